"""Runs the parts of the suite that were asked for, in a fixed order, and says what they found."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mtp_jax.bench.suite.batches import goodput
from mtp_jax.bench.suite.cpu import cpu_model
from mtp_jax.bench.suite.numerics import numerics
from mtp_jax.bench.suite.peers import peers
from mtp_jax.bench.suite.setting import Findings, Loaded, Row, Setting
from mtp_jax.bench.suite.steps import ceilings, experts, plain, same_tokens, speculative
from mtp_jax.bench.tables import table

Part = Callable[[Setting, Findings], dict[str, Any]]
DensePart = Callable[[Setting, Findings, Loaded], dict[str, Any]]

ON_DENSE: Mapping[str, DensePart] = {
    "plain": plain,
    "speculative": speculative,
    "tokens": same_tokens,
    "goodput": goodput,
}
"""Parts that share the dense model's weights."""
ALONE: Mapping[str, Part] = {"peers": peers, "experts": experts, "numerics": numerics}
ON_CPU: Mapping[str, Part] = {name: partial(cpu_model, name) for name in ("tiny-mtp", "smollm2-135m")}
"""Models that are served on a CPU, each a part of its own."""
SUITES = {"h200": ("ceilings", *ON_DENSE, *ALONE), "cpu": (*ON_CPU, "numerics")}
"""The parts of each suite. Those of one run go in the order of `PARTS`."""
PARTS = ("ceilings", *ON_DENSE, *ON_CPU, *ALONE)


_OTHERS = {**ON_CPU, **ALONE}


def run_suite(
    setting: Setting, parts: Sequence[str], on_part: Callable[[str, Findings], None] = lambda name, findings: None
) -> Findings:
    """Runs `parts`; `on_part` is told after each, so that nothing is lost when a later one fails."""
    findings = Findings()
    dense: Loaded | None = None
    for name in (name for name in PARTS if name in parts):
        start = time.perf_counter()
        if name in ON_DENSE:
            dense = setting.load_model(setting.dense) if dense is None else dense
            figures = ON_DENSE[name](setting, findings, dense)
        elif name in _OTHERS:
            dense = None  # its weights give way
            figures = _OTHERS[name](setting, findings)
        else:
            figures = ceilings(setting, findings)
        findings.figures[name] = {**figures, "seconds": round(time.perf_counter() - start, 1)}
        on_part(name, findings)
    return findings


def as_text(rows: Sequence[Row]) -> str:
    """The table for people."""
    head = ["", "batch", "ms/step", "floor", "x floor", "tokens/s", "x plain", "efficiency", "kernels", "idle", ""]
    return table([head, *(_cells(row) for row in rows)])


def _cells(row: Row) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        row.what,
        shown(row.batch_size, "d"),
        shown(row.ms_per_step, ".3f"),
        shown(row.floor_ms, ".3f"),
        shown(row.over_floor, ".2f"),
        shown(row.tokens_per_s, ".0f"),
        shown(row.against_plain, ".2f"),
        shown(row.efficiency, ".2f"),
        shown(row.kernels, ".0f"),
        shown(row.idle_share, ".1%"),
        row.note,
    ]


def json_line(findings: Findings, facts: Mapping[str, Any]) -> str:
    """Every figure in one line, with how it was measured."""
    return json.dumps({"bench": "suite", **facts, "parts": findings.figures})
