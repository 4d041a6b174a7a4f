"""The decode benchmark: every fixed draft length, plain decoding and the goodput policy on the same requests.

Draft lengths 0..Kmax run on one engine, whose policy is exchanged between runs; plain decoding runs on an engine
without drafter, the fastest plain program there is. `K=0` is that first engine drafting nothing: what it costs to keep
the drafter's KV cache up to date. Engines that draft in other ways may run against them, each at its longest drafts.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_jax.bench.equality import Difference, differences
from mtp_jax.bench.measure import Run, Timing, Variant, Workload, time_in_turns
from mtp_jax.bench.tables import shares, step_counts, table
from mtp_jax.core.shapes import StepShape
from mtp_jax.llm import LLM
from mtp_jax.policies.schedule import ScheduledDraftLen

PLAIN = "plain"
GOODPUT = "goodput"


@dataclass(frozen=True)
class DecodeBench:
    """Results for one batch size. `timings` by variant: "plain", "K=0" ... "K=Kmax", "goodput"."""

    batch_size: int
    timings: Mapping[str, Timing]
    differences: Mapping[str, Sequence[Difference]]
    step_cost_ms: Mapping[StepShape, float]  # of the drafting engine, measured one at a time after warm-up
    compile_s: Mapping[str, float]  # by engine: compile and first run of its whole grid
    num_rows: Mapping[str, int]  # that a step verifies, the pending token's included; no entry where it varies

    def as_dict(self) -> dict[str, Any]:
        """What the JSON line says about this batch size."""
        plain = self.timings[PLAIN]
        return {
            "batch_size": self.batch_size,
            "variants": {
                name: {
                    "tokens_per_s": round(timing.tokens_per_s, 2),
                    "tokens_per_s_runs": [round(run.tokens_per_s, 2) for run in timing.runs],
                    "ratio_to_plain": round(timing.ratio_to(plain), 4),
                    "ms_per_step": round(timing.ms_per_step, 4),
                    "rows_per_step": self.num_rows.get(name),
                    "mean_acceptance_length": round(timing.mean_acceptance_length, 4),
                    "acceptance_unconditional": [round(share, 4) for share in timing.acceptance.unconditional],
                    "acceptance_conditional": [round(share, 4) for share in timing.acceptance.conditional],
                    "steps_by_draft_len": timing.acceptance.draft_lens,
                    "num_requests_different_from_plain": len(self.differences[name]),
                    "first_differences": [dataclasses.asdict(difference) for difference in self.differences[name]],
                }
                for name, timing in self.timings.items()
            },
            "step_cost_ms": {
                f"slots={shape.slots},K={shape.draft_len}": round(cost, 4) for shape, cost in self.step_cost_ms.items()
            },
            "compile_s": {name: round(seconds, 2) for name, seconds in self.compile_s.items()},
        }

    def as_text(self) -> str:
        """A table for people."""
        plain = self.timings[PLAIN]
        head = ["", "tokens/s", "x plain", "ms/step", "rows/step", "tokens/step", "different"]
        rows = [
            [
                name,
                f"{timing.tokens_per_s:.1f}",
                f"{timing.ratio_to(plain):.2f}",
                f"{timing.ms_per_step:.2f}",
                str(self.num_rows.get(name, "")),
                f"{timing.mean_acceptance_length:.2f}",
                str(len(self.differences[name])),
            ]
            for name, timing in self.timings.items()
        ]
        drafting = [(name, timing.acceptance) for name, timing in self.timings.items() if name != PLAIN]
        acceptance = [
            ["acceptance by position", "of drafts made", "given all before kept", "draft lengths used"],
            *(
                [name, shares(found.unconditional), shares(found.conditional), step_counts(found.draft_lens)]
                for name, found in drafting
            ),
        ]
        costs = [
            ["step cost", "slots", "K", "ms"],
            *(["", str(shape.slots), str(shape.draft_len), f"{ms:.2f}"] for shape, ms in self.step_cost_ms.items()),
        ]
        compiled = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.compile_s.items())
        parts = [
            f"batch size {self.batch_size}",
            table([head, *rows]),
            table(acceptance),
            table(costs),
            f"compiled: {compiled}",
        ]
        return "\n\n".join(parts)


def bench_decode(
    drafting: LLM,
    plain: LLM,
    workload: Workload,
    *,
    repeats: int,
    against: Mapping[str, LLM] | None = None,
    on_run: Callable[[], object] = lambda: None,
) -> DecodeBench:
    """Times the workload under every variant. `drafting` was built with the goodput policy, `plain` without drafter.

    `against`: more engines by name, timed at their Kmax.
    """
    against = against or {}
    batch_size = len(workload.prompts)
    fixed = {
        f"K={draft_len}": Variant(drafting, ScheduledDraftLen(((batch_size, draft_len),)))
        for draft_len in range(drafting.engine.config.max_draft_len + 1)
    }
    others = {
        name: Variant(llm, ScheduledDraftLen(((batch_size, llm.engine.config.max_draft_len),)))
        for name, llm in against.items()
    }
    variants = {PLAIN: Variant(plain), **fixed, GOODPUT: Variant(drafting), **others}
    timings = time_in_turns(variants, workload, repeats=repeats, on_run=on_run)
    reference = timings[PLAIN].runs[0]
    return DecodeBench(
        batch_size=batch_size,
        timings=timings,
        differences={name: _in_any_run(timing, reference) for name, timing in timings.items()},
        step_cost_ms={StepShape(*key): 1000 * cost for key, cost in drafting.engine.step_costs.items()},
        compile_s={
            "drafting": max(drafting.engine.launcher.warm_up_s.values()),
            PLAIN: max(plain.engine.launcher.warm_up_s.values()),
            **{name: max(llm.engine.launcher.warm_up_s.values()) for name, llm in against.items()},
        },
        num_rows={
            PLAIN: 1,
            **{f"K={draft_len}": _num_rows(drafting, draft_len) for draft_len in range(len(fixed))},
            **{name: _num_rows(llm, llm.engine.config.max_draft_len) for name, llm in against.items()},
        },
    )


def _num_rows(llm: LLM, draft_len: int) -> int:
    return llm.engine.config.topology.num_drafts(draft_len) + 1


def _in_any_run(timing: Timing, plain: Run) -> list[Difference]:
    """The earliest difference of each request over all runs, which need not have used the same draft lengths."""
    found = (difference for run in timing.runs for difference in differences(run, plain))
    earliest: dict[int, Difference] = {}
    for difference in found:
        known = earliest.get(difference.request)
        if known is None or difference.position < known.position:
            earliest[difference.request] = difference
    return list(earliest.values())


def json_line(results: Sequence[DecodeBench], facts: Mapping[str, Any]) -> str:
    """The whole benchmark in one line: `facts` of how it was run, and every figure."""
    return json.dumps({"bench": "decode", **facts, "results": [result.as_dict() for result in results]})
