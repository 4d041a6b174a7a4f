"""`LLM`: what a notebook or a script uses. Text, tokenizer and outputs around an `Engine` of token ids."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tokenizers import Tokenizer
from tqdm import tqdm

from mtp_jax.checkpoints import add_drafter, load_model
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError, EngineFailed
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.interrupts import interrupts_held
from mtp_jax.engine.launch import OnShape
from mtp_jax.engine.requests import Progress, Request, StepRecord
from mtp_jax.jobs import Job, Samples, derived_seed, params_of_samples, sample_seed
from mtp_jax.memory import check_memory
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.shortlist import with_shortlist
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.options import check_option_names, engine_config, mesh_config, resolve_dtype
from mtp_jax.outputs import RequestOutput
from mtp_jax.progress import compile_bar
from mtp_jax.prompts import Prompt, checked_tokens, params_for, prompt_list, single_params
from mtp_jax.text import Detokenizer, encode, in_tokens, tokenizer_of


class LLM:
    """A model ready to generate: weights loaded, every step of the grid compiled.

    `model` is a bundled name ("tiny-mtp"), a folder in Hugging Face layout, an Orbax folder of ours or a `.gguf` file.
    `dtype`: "auto" is float32 on a CPU and the checkpoint's own on accelerators; or "float32", "bfloat16", "float16".
    `speculative_config` None is plain decoding; a dict is taken as `SpeculativeConfig(**dict)`.
    Starting takes a while; a bar shows it on a terminal, or `on_shape` is called as each program is compiled.
    Raises `ConfigError` (a `ValueError`) for anything that cannot be honoured.

    >>> llm = LLM("tiny-mtp", speculative_config={"method": "mtp"}, max_model_len=64)      # doctest: +SKIP
    >>> llm.generate("def fib(n):", SamplingParams(max_tokens=4))[0].outputs[0].token_ids  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str = "auto",
        on_shape: OnShape | None = None,
        **options: Any,
    ) -> None:
        check_option_names(options)
        loaded = load_model(model, dtype=resolve_dtype(dtype), mesh=mesh_config(options.get("mesh")))
        self._start(
            loaded.family,
            loaded.weights,
            tokenizer_of(loaded),
            jnp.dtype(loaded.dtype),
            speculative_config,
            on_shape,
            options,
            loaded.tokens_by_rank,
        )

    @classmethod
    def from_weights(
        cls,
        family: ModelFamily,
        weights: Weights,
        *,
        tokenizer: Tokenizer | None = None,
        dtype: Any = jnp.float32,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        on_shape: OnShape | None = None,
        tokens_by_rank: Sequence[int] | None = None,
        **options: Any,
    ) -> "LLM":
        """An `LLM` over weights that are in memory already, such as a head that was just trained.

        `tokens_by_rank`: token ids, the most frequent first, which `draft_vocab_size` needs.
        """
        llm = cls.__new__(cls)
        llm._start(family, weights, tokenizer, jnp.dtype(dtype), speculative_config, on_shape, options, tokens_by_rank)
        return llm

    def _start(
        self,
        family: ModelFamily,
        weights: Weights,
        tokenizer: Tokenizer | None,
        dtype: jnp.dtype,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None,
        on_shape: OnShape | None,
        options: dict[str, Any],
        tokens_by_rank: Sequence[int] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.dtype = dtype
        check_option_names(options)
        config = engine_config(family, speculative_config, **options)
        drafter = config.speculative.model
        if drafter is not None and not isinstance(family, WithDrafter):
            family, weights = add_drafter(family, weights, drafter, dtype=dtype.name)
        self.family = family
        check_memory(family, config, dtype)
        if config.speculative.draft_vocab_size is not None:
            weights = with_shortlist(family, weights, tokens_by_rank, config.speculative.draft_vocab_size)
        with nullcontext(on_shape) if on_shape is not None else compile_bar(family, config) as told:
            self.engine = Engine(family, weights, config, dtype=dtype, on_shape=told)
        self._num_requests = 0
        self._sinks: dict[str, list[Progress]] = {}

    # ---- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A request that cannot be served comes back rejected; the others go on.

        `on_output` gets each output as soon as its request ends. On a mesh of several processes every one of them must
        call this, each with prompts of its own (none is allowed); processes that share a data shard with the same ones.
        `EngineFailed` when a device or another process fails; its `outputs` are those of the requests that had ended.
        """
        given = prompt_list(prompts)
        params_list = params_for(given, sampling_params)
        groups = [
            self._samples(prompt, params, index)
            for index, (prompt, params) in enumerate(zip(given, params_list, strict=True))
        ]
        group_of = {job: group for group in groups for job in group.jobs}
        with tqdm(total=len(groups), desc="requests", unit="req", disable=None if use_tqdm else True) as bar:

            def on_finished(job: Job) -> None:
                if group_of[job].is_finished:
                    bar.update()
                    if on_output is not None:
                        on_output(group_of[job].output())

            try:
                self._run(list(group_of), on_finished)
            except EngineFailed as failure:
                failure.outputs = [group.output() for group in groups if group.is_finished]
                raise
        return [group.output() for group in groups]

    def generate_each(
        self, requests: Iterable[tuple[Prompt, SamplingParams]], *, wants_trace: bool = False
    ) -> Iterator[tuple[int, RequestOutput]]:
        """(place in `requests`, output) of each request as it ends: for more requests than anyone wants in memory.

        Requests are taken as slots come free, with as many again waiting. Those without a seed draw by their place, as
        in `generate`. Closing the iterator cancels what is under way. Raises `EngineFailed` as `generate` does.
        `wants_trace`: outputs have the records of their steps.
        """
        room = 2 * self.engine.config.max_num_seqs
        source = enumerate(requests)
        groups: dict[int, Samples] = {}
        self.engine.start()
        try:
            while True:
                for place, (prompt, params) in islice(source, room - len(groups)):
                    groups[place] = self._samples(prompt, params, place, wants_trace=wants_trace)
                    for job in groups[place].jobs:
                        self._submit(job)
                if not groups:
                    return
                ended = [place for place, group in groups.items() if self._are_over(group)]
                for place in ended:
                    group = groups.pop(place)
                    for job in group.jobs:
                        self._sinks.pop(job.request.request_id)
                    yield place, group.output()
                if groups and not ended:
                    self._step()
        finally:
            for group in groups.values():
                for job in group.jobs:
                    self._forget(job)
            self._drain_if_idle()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, RequestOutput]:
        """Deltas of the text as they come; a step may bring several tokens. Joined they are the whole text.

        The generator's return value (`output = yield from llm.stream(...)`) is what `generate` would have returned.
        Raises `ConfigError` if the request is refused. Closing the iterator cancels the request.
        """
        samples = self._samples(prompt, single_params(params, "stream"), 0)
        (job,) = samples.jobs
        if self.tokenizer is None:
            raise ConfigError("stream gives text and this model has no tokenizer; use generate with token ids.")
        num_sent = 0
        for _ in self._progress_of(job):
            text = job.settled_text
            if len(text) > num_sent:
                yield text[num_sent:]
                num_sent = len(text)
        return samples.output()

    def trace(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepRecord]:
        """One `StepRecord` per decode step: what was drafted, what the target said, what was emitted.

        The first token is the prefill's, and in no record. Raises `ConfigError` if the request is refused.
        """
        (job,) = self._samples(prompt, single_params(params, "trace"), 0, wants_trace=True).jobs
        num_sent = 0
        for _ in self._progress_of(job):
            fresh = job.records[num_sent:]
            num_sent += len(fresh)  # counted before they are handed out: another reader's steps add records meanwhile
            yield from fresh

    def get_metrics(self) -> dict[str, Any]:
        """Totals since start, under vLLM's names; per-position counts are unconditional (accepted at that position).

        "is_lossy": whether the configuration lets tokens stand that plain decoding would not write, or not as often.
        """
        totals = self.engine.group.totals
        num_drafts = totals.num_drafts
        return {
            "spec_decode_num_drafts": num_drafts,
            "spec_decode_num_draft_tokens": totals.num_draft_tokens,
            "spec_decode_num_accepted_tokens": totals.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": list(totals.num_accepted_tokens_per_pos),
            "spec_decode_num_draft_tokens_per_pos": list(totals.num_draft_tokens_per_pos),
            "mean_acceptance_length": 1 + totals.num_accepted_tokens / num_drafts if num_drafts else 1.0,
            "num_decode_slot_steps": totals.num_slot_steps,
            "num_generated_tokens": totals.num_emitted_tokens,
            "num_preemptions": totals.num_preemptions,
            "prefix_cache_queries": totals.num_prefix_queries,
            "prefix_cache_hits": totals.num_prefix_hits,
            "is_lossy": self.engine.config.speculative.is_lossy,
        }

    # ---- inside

    def _samples(self, prompt: Prompt, params: SamplingParams, index: int, *, wants_trace: bool = False) -> Samples:
        """The requests that one prompt of a call makes: `params.n` of them, alike but for their seeds."""
        self._num_requests += 1
        request_id = str(self._num_requests - 1)
        text, tokens, problem = self._tokens_of(prompt)
        if params.stop_strings and self.tokenizer is None and problem is None:
            problem = "Stop strings need a tokenizer and this model has none; use stop_token_ids."
        try:
            params = in_tokens(params, self.tokenizer)
        except ConfigError as error:
            problem = problem or str(error)
        seed = params.seed if params.seed is not None else derived_seed(self.engine.config.seed, index)
        jobs: list[Job] = []
        for sample, of_sample in enumerate(params_of_samples(params)):
            detokenizer = None
            if self.tokenizer is not None and all(isinstance(stop, str) and stop for stop in params.stop_strings):
                detokenizer = Detokenizer(self.tokenizer, params.stop_strings, params.min_tokens)
            request = Request(
                request_id=request_id if sample == 0 else f"{request_id}.{sample}",
                prompt=tuple(tokens),
                params=of_sample,
                seed=sample_seed(seed, sample),
                eos_token_ids=self.family.eos_token_ids,
                watcher=detokenizer,
                wants_trace=wants_trace,
            )
            jobs.append(Job(request, detokenizer, problem, self.tokenizer))
        return Samples(text, jobs, is_lossy=self.engine.config.speculative.is_lossy)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str | None]:
        if isinstance(prompt, Mapping):
            if not {*prompt} <= {"prompt", "prompt_token_ids"} or not prompt:
                return None, (), f"The prompt is {prompt!r}; a dict takes 'prompt' and 'prompt_token_ids' only."
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), *checked_tokens(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, *checked_tokens(prompt)
        if self.tokenizer is None:
            return prompt, (), "The prompt is text and this model has no tokenizer; give token ids."
        try:
            return prompt, encode(self.tokenizer, prompt), None
        except ConfigError as error:
            return prompt, (), str(error)

    def _progress_of(self, job: Job) -> Iterator[None]:
        """Steps until the job is finished. Raises `ConfigError` if it is refused, before or by admission."""
        try:
            self._submit(job)
            while not job.is_finished:
                self._step()
                self._deliver(job)
                job.raise_if_rejected()
                yield
            job.raise_if_rejected()
        finally:
            self._forget(job)

    def _run(self, jobs: Sequence[Job], on_finished: Callable[[Job], None]) -> None:
        unfinished = list(jobs)
        self.engine.start()
        try:
            for job in jobs:
                self._submit(job)
            while unfinished:
                for job in unfinished:
                    self._deliver(job)
                for job in unfinished:
                    if job.is_finished:
                        on_finished(job)
                unfinished = [job for job in unfinished if not job.is_finished]
                if unfinished:
                    self._step()
        finally:
            for job in jobs:
                self._forget(job)
            self._drain_if_idle()

    def _submit(self, job: Job) -> None:
        self._sinks[job.request.request_id] = []
        if job.problem is not None:
            job.reject(job.problem)
        else:
            self.engine.submit(job.request)

    def _step(self) -> None:
        """One engine step; progress goes to whoever owns the request, so that several streams can be open at once."""
        with interrupts_held():
            for progress in self.engine.step():
                sink = self._sinks.get(progress.request_id)
                if sink is not None:
                    sink.append(progress)

    def _deliver(self, job: Job) -> None:
        sink = self._sinks[job.request.request_id]
        for progress in sink:
            job.take(progress)
        sink.clear()

    def _are_over(self, samples: Samples) -> bool:
        for job in samples.jobs:
            self._deliver(job)
        return samples.is_finished

    def _forget(self, job: Job) -> None:
        """Ends a request that its reader left, and reads what is in flight once nobody is served."""
        self._sinks.pop(job.request.request_id, None)
        if not job.is_finished:
            self.engine.cancel(job.request.request_id)
        self._drain_if_idle()

    def _drain_if_idle(self) -> None:
        if not self.engine.group.has_work:
            self.engine.drain()
