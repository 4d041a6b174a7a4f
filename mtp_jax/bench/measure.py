"""Timed runs: the same requests through several engines or policies, in turns, so that the machine's drift hits all."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtp_jax.bench.recording import Acceptance, Recorded
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request, RequestState, TokenLogprob
from mtp_jax.jobs import derived_seed
from mtp_jax.llm import LLM
from mtp_jax.policies.api import DraftLenPolicy, StepStats
from mtp_jax.policies.schedule import NO_DRAFTS
from mtp_jax.text import Detokenizer

OnRun = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, all handed in at once, each with the same parameters.

    `max_tokens` gives every request a length of its own; without it `params.max_tokens` is everybody's.
    `fills_first`: nothing is drafted until every request has its first token, so that whatever is compared from there
    on starts alike.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    max_tokens: tuple[int, ...] | None = None
    fills_first: bool = False

    def params_of(self, index: int) -> SamplingParams:
        """The parameters of the request with that index."""
        return self.params if self.max_tokens is None else replace(self.params, max_tokens=self.max_tokens[index])


@dataclass(frozen=True)
class Variant:
    """One way to serve a workload. `policy` None: the engine's own."""

    llm: LLM
    policy: DraftLenPolicy | None = None


@dataclass(frozen=True)
class Phase:
    """The part of a run whose decode steps ran at one slots bucket, after every request had its first token."""

    num_tokens: int  # emitted in it
    seconds: float  # wall clock

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted a second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Run:
    """One pass over a workload. Times are seconds of wall clock."""

    tokens: tuple[tuple[int, ...], ...]  # emitted, by request
    logprobs: tuple[tuple[TokenLogprob, ...], ...]  # empty unless the parameters ask for them
    total_s: float  # first request handed in, to last token read
    decode_s: float  # the part of it after every request had its first token
    steps: tuple[StepStats, ...]  # decode steps finished in that part
    mean_acceptance_length: float  # tokens a slot gained in a decode step
    phases: Mapping[int, Phase] = field(default_factory=dict[int, Phase])  # by slots bucket

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens emitted after every request had its first one, over the time that took."""
        return sum(phase.num_tokens for phase in self.phases.values()) / self.decode_s

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

    @property
    def decode_tokens_per_s(self) -> float:
        """The median run's."""
        return statistics.median(run.decode_tokens_per_s for run in self.runs)

    def phase_tokens_per_s(self, slots: int) -> float:
        """The median run's speed in the phase of that slots bucket; `StatisticsError` where no run had it."""
        return statistics.median(run.phases[slots].tokens_per_s for run in self.runs if slots in run.phases)

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
    scheduler.policy = NO_DRAFTS if workload.fills_first else recorded
    try:
        run = _serve(llm.engine, requests_of(llm, workload), recorded)
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
            params=workload.params_of(index),
            seed=params.seed if seeded else derived_seed(llm.engine.config.seed, index),  # type: ignore[arg-type]
            eos_token_ids=llm.family.eos_token_ids,
            watcher=Detokenizer(llm.tokenizer, params.stop_strings, params.min_tokens)
            if llm.tokenizer is not None
            else None,
        )
        for index, prompt in enumerate(workload.prompts)
    ]


def _serve(engine: Engine, requests: Sequence[Request], recorded: Recorded) -> Run:
    steps = recorded.steps
    states: dict[str, RequestState] = {}
    num_prefill_steps: int | None = None
    phases: dict[int, Phase] = {}
    start = decode_start = turn_start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        num_tokens = 0
        for progress in engine.step():
            if progress.error is not None:
                raise ConfigError(progress.error)
            states[progress.request_id] = progress.state
            num_tokens += len(progress.new_tokens)
        turn_end = time.perf_counter()
        if num_prefill_steps is not None and steps:
            slots = steps[-1].slot_bucket
            before = phases.get(slots, Phase(0, 0.0))
            phases[slots] = Phase(before.num_tokens + num_tokens, before.seconds + turn_end - turn_start)
        turn_start = turn_end
        if num_prefill_steps is None and len(states) == len(requests):
            decode_start, num_prefill_steps = turn_end, len(steps)
            if engine.scheduler.policy is NO_DRAFTS:
                engine.scheduler.policy = recorded
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
        phases=dict(sorted(phases.items(), reverse=True)),
    )
