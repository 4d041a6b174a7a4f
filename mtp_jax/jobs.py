"""Requests on their way through the engine, and the output that the samples of one prompt make together."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from mtp_jax.core.config import FinishReason, SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.requirements import is_int
from mtp_jax.core.sampling_params import MAX_SAMPLES
from mtp_jax.engine.requests import Progress, Request, StepRecord, merged_metrics
from mtp_jax.outputs import CompletionOutput, Logprob, RequestOutput, listed_logprobs
from mtp_jax.text import Detokenizer


class Job:
    """One request and what it brought so far."""

    def __init__(
        self, request: Request, detokenizer: Detokenizer | None, problem: str | None, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.problem = problem
        self.is_finished = False
        self.last: Progress | None = None
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer

    @property
    def settled_text(self) -> str:
        """The text that can no longer change."""
        return "" if self._detokenizer is None else self._detokenizer.settled_text

    @property
    def records(self) -> list[StepRecord]:
        """Its decode steps, if it is traced."""
        return [] if self.last is None else self.last.state.records

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Of each token of the prompt, the first one's None; None altogether if they were not asked for."""
        wanted = self.request.params.prompt_logprobs
        if wanted is None or self.problem is not None or self.last is None:
            return None
        return [None, *listed_logprobs(self.last.state.prompt_logprobs, wanted, self._tokenizer)]

    def take(self, progress: Progress) -> None:
        """Takes in what a step brought it."""
        self.last = progress
        if progress.finish_reason is None:
            return
        self.is_finished = True
        self.problem = progress.error
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def reject(self, problem: str) -> None:
        """Ends it before it reaches the engine."""
        self.problem, self.is_finished = problem, True

    def raise_if_rejected(self) -> None:
        """Raises `ConfigError` with the reason."""
        if self.problem is not None:
            raise ConfigError(self.problem)

    def completion(self, index: int, *, is_lossy: bool) -> CompletionOutput:
        """Its output as the sample of this index."""
        last = self.last
        if self.problem is not None or last is None:
            return CompletionOutput(index, "", [], FinishReason.REJECTED.value, error=self.problem)
        wanted = self.request.params.logprobs
        return CompletionOutput(
            index=index,
            text="" if self._detokenizer is None else self._detokenizer.text,
            token_ids=list(last.state.tokens),
            finish_reason=last.finish_reason.value if last.finish_reason else None,
            stop_reason=last.stop_reason,
            logprobs=None if wanted is None else listed_logprobs(last.state.logprobs, wanted, self._tokenizer),
            is_lossy=is_lossy,
            records=list(last.state.records) if self.request.wants_trace else None,
        )


class Samples:
    """The jobs of one prompt of a call, its text if it came as text."""

    def __init__(self, prompt: str | None, jobs: Sequence[Job], *, is_lossy: bool) -> None:
        self.jobs = jobs
        self._prompt = prompt
        self._is_lossy = is_lossy

    @property
    def is_finished(self) -> bool:
        """All of them are."""
        return all(job.is_finished for job in self.jobs)

    def output(self) -> RequestOutput:
        """One output for all samples; its metrics are their sums."""
        first = self.jobs[0]
        states = [job.last.state for job in self.jobs if job.problem is None and job.last is not None]
        return RequestOutput(
            request_id=first.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(first.request.prompt),
            outputs=[job.completion(index, is_lossy=self._is_lossy) for index, job in enumerate(self.jobs)],
            metrics=merged_metrics([state.metrics for state in states]),
            prompt_logprobs=first.prompt_logprobs,
        )


def params_of_samples(params: SamplingParams) -> list[SamplingParams]:
    """Those of each sample, `n` in all; the prompt's log-probabilities are the first one's to bring.

    An `n` that is out of range, or of no use at temperature 0, is left for admission to name.
    """
    if not is_int(params.n) or not 1 < params.n <= MAX_SAMPLES or params.temperature == 0:
        return [params]
    first = replace(params, n=1)
    return [first, *[replace(first, prompt_logprobs=None)] * (params.n - 1)]


def derived_seed(llm_seed: int, index: int) -> int:
    """The seed of a request that brought none: from the LLM's seed and its index in the call."""
    return _digest(f"{llm_seed},{index},0")


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a request's sample: its own for the first one, so that `n` does not change that one's tokens."""
    return seed if sample == 0 else _digest(f"sample {sample} of {seed}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
