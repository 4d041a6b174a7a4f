"""Timed runs: the same requests through several engines or policies, in turns, so that the machine's drift hits all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtp_jax.bench.recording import Acceptance, Recorded
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request, RequestState, TokenLogprob
from mtp_jax.llm import LLM, derived_seed
from mtp_jax.policies.api import DraftLenPolicy, StepStats
from mtp_jax.text import Detokenizer

OnRun = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, all handed in at once, each with the same parameters."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams


@dataclass(frozen=True)
class Variant:
    """One way to serve a workload. `policy` None: the engine's own."""

    llm: LLM
    policy: DraftLenPolicy | None = None


@dataclass(frozen=True)
class Run:
    """One pass over a workload. Times are seconds of wall clock."""

    tokens: tuple[tuple[int, ...], ...]  # emitted, by request
    logprobs: tuple[tuple[TokenLogprob, ...], ...]  # empty unless the parameters ask for them
    total_s: float  # first request handed in, to last token read
    decode_s: float  # the part of it after every request had its first token
    steps: tuple[StepStats, ...]  # decode steps finished in that part
    mean_acceptance_length: float  # tokens a slot gained in a decode step

    @property
    def tokens_per_s(self) -> float:
        """All emitted tokens over the whole time, prompts included."""
        return sum(map(len, self.tokens)) / self.total_s

    @property
    def ms_per_step(self) -> float:
        """Mean time from one decode step to the next; 0 without decode steps."""
        return 1000 * self.decode_s / len(self.steps) if self.steps else 0.0


@dataclass(frozen=True)
class Timing:
    """Several runs of one variant."""

    runs: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> float:
        """The median run's."""
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def ms_per_step(self) -> float:
        """The median run's."""
        return statistics.median(run.ms_per_step for run in self.runs)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean over the runs, which differ only where a policy learns."""
        return statistics.fmean(run.mean_acceptance_length for run in self.runs)

    @property
    def acceptance(self) -> Acceptance:
        """Of all runs together."""
        return Acceptance.of(step for run in self.runs for step in run.steps)

    def ratio_to(self, other: "Timing") -> float:
        """How many times faster than `other`, by the medians."""
        return self.tokens_per_s / other.tokens_per_s


def time_in_turns(
    variants: dict[str, Variant], workload: Workload, *, repeats: int, on_run: OnRun = lambda: None
) -> dict[str, Timing]:
    """Every variant once untimed, then `repeats` rounds of one run each. `on_run` is called after each run.

    Every other round goes backwards, so that no variant always follows the same one.
    """
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    policies = {name: variant.policy or variant.llm.engine.scheduler.policy for name, variant in variants.items()}
    for index in range(repeats + 1):
        for name in reversed(variants) if index % 2 else variants:
            run, policies[name] = run_once(variants[name].llm, workload, policies[name])
            runs[name].append(run)
            on_run()
    return {name: Timing(tuple(all_runs[1:])) for name, all_runs in runs.items()}


def run_once(llm: LLM, workload: Workload, policy: DraftLenPolicy) -> tuple[Run, DraftLenPolicy]:
    """Serves the workload under `policy`: (what happened, the policy with what it has learnt).

    Raises `ConfigError` when a request is refused.
    """
    scheduler = llm.engine.scheduler
    own = scheduler.policy
    recorded = Recorded(policy)
    scheduler.policy = recorded
    try:
        run = _serve(llm.engine, requests_of(llm, workload), recorded.steps)
        learnt = scheduler.policy
    finally:
        scheduler.policy = own
    return run, learnt.inner if isinstance(learnt, Recorded) else learnt


def requests_of(llm: LLM, workload: Workload) -> list[Request]:
    """Fresh requests, as `LLM.generate` would make them."""
    params = workload.params
    seeded = params.seed is not None
    return [
        Request(
            request_id=str(index),
            prompt=prompt,
            params=params,
            seed=params.seed if seeded else derived_seed(llm.engine.config.seed, index, 0),  # type: ignore[arg-type]
            eos_token_ids=llm.family.eos_token_ids,
            watcher=Detokenizer(llm.tokenizer, params.stop_strings) if llm.tokenizer is not None else None,
        )
        for index, prompt in enumerate(workload.prompts)
    ]


def _serve(engine: Engine, requests: Sequence[Request], steps: list[StepStats]) -> Run:
    states: dict[str, RequestState] = {}
    num_prefill_steps: int | None = None
    start = decode_start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for progress in engine.step():
            if progress.error is not None:
                raise ConfigError(progress.error)
            states[progress.request_id] = progress.state
        if num_prefill_steps is None and len(states) == len(requests):
            decode_start, num_prefill_steps = time.perf_counter(), len(steps)
    end, num_steps = time.perf_counter(), len(steps)
    engine.drain()
    ordered = [states[request.request_id] for request in requests]
    num_slot_steps = sum(state.metrics.num_steps for state in ordered)
    num_accepted = sum(state.metrics.num_accepted_tokens for state in ordered)
    return Run(
        tokens=tuple(tuple(state.tokens) for state in ordered),
        logprobs=tuple(tuple(state.logprobs) for state in ordered),
        total_s=end - start,
        decode_s=end - decode_start,
        steps=tuple(steps[num_prefill_steps:num_steps]),
        mean_acceptance_length=1 + num_accepted / num_slot_steps if num_slot_steps else 1.0,
    )
