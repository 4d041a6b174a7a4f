"""The policy benchmark: a batch of unequal requests drained under every fixed draft length and under goodput, in turns.

The drain begins when every request has its first token; until then nothing is drafted, so that all begin alike.
All variants run on one engine, whose policy is exchanged between runs; goodput keeps what it has learnt from one run to
the next. The batch empties, so its steps pass through every slots bucket: each bucket is a phase with its own best K.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_jax.bench.drain import Recording, ShapeKey
from mtp_jax.bench.equality import differences
from mtp_jax.bench.measure import Timing, Variant, Workload, time_in_turns
from mtp_jax.bench.tables import step_counts, table
from mtp_jax.llm import LLM
from mtp_jax.policies.api import StepStats
from mtp_jax.policies.schedule import ScheduledDraftLen

NOTHING_DRAFTED = "K=0"
GOODPUT = "goodput"


@dataclass(frozen=True)
class PolicyBench:
    """`timings` by variant: "K=0" ... "K=Kmax", "goodput". `recording` is what a simulated drain needs."""

    timings: Mapping[str, Timing]
    num_different: Mapping[str, int]  # requests whose tokens were not those of K=0, in any run
    recording: Recording

    @property
    def best_fixed(self) -> str:
        """The fixed draft length with the most tokens a second over the whole drain."""
        fixed = [name for name in self.timings if name != GOODPUT]
        return max(fixed, key=lambda name: self.timings[name].decode_tokens_per_s)

    def ratio(self, name: str, other: str) -> float:
        """A variant's speed over another's, over the whole drain."""
        return self.timings[name].decode_tokens_per_s / self.timings[other].decode_tokens_per_s

    def ratios(self, name: str, other: str) -> tuple[float, ...]:
        """The same, of the runs of each round: they met the same spell of the machine."""
        pairs = zip(self.timings[name].runs, self.timings[other].runs, strict=True)
        return tuple(run.decode_tokens_per_s / against.decode_tokens_per_s for run, against in pairs)

    @property
    def phases(self) -> tuple[int, ...]:
        """Slots buckets that every variant passed through, the largest first."""
        seen = [{slots for run in timing.runs for slots in run.phases} for timing in self.timings.values()]
        return tuple(sorted(set.intersection(*seen), reverse=True))

    def phase_ratio(self, name: str, slots: int) -> float:
        """A variant's speed over that of K=0 in one phase."""
        plain = self.timings[NOTHING_DRAFTED]
        return self.timings[name].phase_tokens_per_s(slots) / plain.phase_tokens_per_s(slots)

    def as_text(self) -> str:
        """Tables for people."""
        head = ["", "tokens/s", "x K=0", "x best K", *(f"{slots} slots" for slots in self.phases), "different"]
        rows = [
            [
                name,
                f"{timing.decode_tokens_per_s:.1f}",
                f"{self.ratio(name, NOTHING_DRAFTED):.3f}",
                f"{self.ratio(name, self.best_fixed):.3f}",
                *(f"{self.phase_ratio(name, slots):.3f}" for slots in self.phases),
                str(self.num_different[name]),
            ]
            for name, timing in self.timings.items()
        ]
        lengths = [["", "draft lengths used"]]
        lengths += [[name, step_counts(timing.acceptance.draft_lens)] for name, timing in self.timings.items()]
        costs = [["step cost", "slots", "K", "ms at warm-up", "ms in use"]]
        for (slots, draft_len), seconds in sorted(self.recording.warm_up_s.items()):
            in_use = self.recording.in_use_s.get((slots, draft_len))
            shown = "-" if in_use is None else f"{1000 * in_use:.3f}"
            costs.append(["", str(slots), str(draft_len), f"{1000 * seconds:.3f}", shown])
        rates = " ".join(f"{rate:.3f}" for rate in self.recording.rates)
        by_round = self.ratios(GOODPUT, self.best_fixed)
        return "\n\n".join(
            [
                table([head, *rows]),
                'Columns "N slots": speed over that of K=0 while steps ran at that slots bucket.',
                table(lengths),
                table(costs),
                f"{GOODPUT} over {self.best_fixed}, round by round: median {statistics.median(by_round):.3f}, "
                f"from {min(by_round):.3f} to {max(by_round):.3f} in {len(by_round)} rounds",
                f"kept at each position, of drafts whose predecessors were: {rates}",
            ]
        )

    def json_line(self, facts: Mapping[str, Any]) -> str:
        """The whole benchmark in one line: `facts` of how it was run, and every figure."""
        variants = {
            name: {
                "tokens_per_s": round(timing.decode_tokens_per_s, 2),
                "tokens_per_s_runs": [round(run.decode_tokens_per_s, 2) for run in timing.runs],
                "ratio_to_k0": round(self.ratio(name, NOTHING_DRAFTED), 4),
                "ratio_to_best_fixed": round(self.ratio(name, self.best_fixed), 4),
                "ratio_to_k0_by_round": [round(ratio, 4) for ratio in self.ratios(name, NOTHING_DRAFTED)],
                "ratio_to_best_fixed_by_round": [round(ratio, 4) for ratio in self.ratios(name, self.best_fixed)],
                "ratio_to_k0_by_slots": {str(slots): round(self.phase_ratio(name, slots), 4) for slots in self.phases},
                "steps_by_draft_len": timing.acceptance.draft_lens,
                "num_requests_different_from_k0": self.num_different[name],
            }
            for name, timing in self.timings.items()
        }
        result = {"best_fixed": self.best_fixed, "variants": variants, "recording": self.recording.as_dict()}
        return json.dumps({"bench": "policy", **facts, **result})


def bench_policy(
    llm: LLM,
    workload: Workload,
    *,
    repeats: int,
    chip: str,
    facts: Mapping[str, Any],
    on_run: Callable[[], object] = lambda: None,
) -> PolicyBench:
    """Drains the workload under every variant, `repeats` rounds after one that is not counted.

    `llm` was built with the goodput policy and a slot for every request; the workload fills first. `facts` go into the
    recording.
    """
    num_slots = len(workload.prompts)
    longest = llm.engine.config.max_draft_len
    names = [f"K={draft_len}" for draft_len in range(longest + 1)]
    fixed = {name: Variant(llm, ScheduledDraftLen(((num_slots, k),))) for k, name in enumerate(names)}
    timings = time_in_turns({**fixed, GOODPUT: Variant(llm)}, workload, repeats=repeats, on_run=on_run)
    reference = timings[NOTHING_DRAFTED].runs[0]
    different = {
        name: len({difference.request for run in timing.runs for difference in differences(run, reference)})
        for name, timing in timings.items()
    }
    recording = Recording(
        chip=chip,
        warm_up_s=dict(llm.engine.step_costs),
        in_use_s=median_elapsed(step for name in names for run in timings[name].runs for step in run.steps),
        rates=timings[names[-1]].acceptance.conditional,
        facts=facts,
    )
    return PolicyBench(timings, different, recording)


def median_elapsed(steps: Iterable[StepStats]) -> dict[ShapeKey, float]:
    """The median of each shape's step times in seconds.

    >>> median_elapsed([StepStats(1, 0, (), (), seconds) for seconds in (0.5, 0.25, 4.0)])
    {(1, 0): 0.5}
    """
    found: defaultdict[ShapeKey, list[float]] = defaultdict(list)
    for step in steps:
        if step.elapsed_s is not None:
            found[step.slot_bucket, step.draft_len].append(step.elapsed_s)
    return {shape: statistics.median(seconds) for shape, seconds in sorted(found.items())}
