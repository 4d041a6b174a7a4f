"""What `LLM.generate` returns. Field names follow vLLM's."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from mtp_jax.engine.requests import RequestMetrics, StepRecord, TokenLogprob


@dataclass(frozen=True)
class Logprob:
    """Raw log-probability of a token at its position, its rank (1: most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence. `error` is set, and the rest empty, when `finish_reason` is "rejected".

    `is_lossy`: the configuration lets tokens stand that plain decoding would not write, or not as often. `records`: its
    decode steps, where they were asked for; the first token is the prefill's.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    is_lossy: bool = False
    records: list[StepRecord] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the emitted tokens, or None when log-probabilities were not asked for."""
        if self.logprobs is None:
            return None
        return sum(step[token].logprob for step, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """Everything about one request, in the order it was given.

    `outputs` has an entry for each of `SamplingParams.n` samples, and `metrics` counts all of them. `prompt_logprobs`
    has one for each prompt token, as `CompletionOutput.logprobs` has for output tokens; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def listed_logprobs(
    logprobs: list[TokenLogprob], num_listed: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """vLLM's form: for each token a dict of the `num_listed` most likely tokens and itself."""

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    listed = []
    for entry in logprobs:
        top = {
            token: Logprob(logprob, rank, text(token))
            for rank, (token, logprob) in enumerate(entry.top[:num_listed], start=1)
        }
        top[entry.token] = Logprob(entry.logprob, entry.rank, text(entry.token))
        listed.append(top)
    return listed
