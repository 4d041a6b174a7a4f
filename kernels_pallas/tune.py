"""Finds the fastest tile for named shapes on this machine's GPU, and writes them to the chip's table.

    python -m kernels_pallas.tune [--only SUBSTRING] [--budget SECONDS] [--output FILE]

Every candidate is one case of `kernels_pallas.bench`: it is checked before it counts, and its time is the kernels' own
on the device. Entries of shapes that were not tuned this time stay as they are.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels_pallas.bench import run_all
from kernels_pallas.bench_cases import SHAPES, Case
from kernels_pallas.paged_attention.mosaic_gpu_tile import (
    SMEM_BYTES,
    TileConfig,
    default_tile,
    is_wide,
    smem_bytes,
    table_key,
    table_path,
)

Tile = tuple[tuple[str, int], ...]


def main(argv: list[str] | None = None) -> int:
    """Tunes the shapes that the arguments name; 0 if each has a right candidate."""
    parser = argparse.ArgumentParser(prog="kernels_pallas.tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="tune shapes whose name holds one of these")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which what still runs is stopped")
    parser.add_argument("--jobs", type=int, default=12, help="candidates compiled side by side")
    parser.add_argument("--output", type=Path, help="the table to write; by default the chip's own in the package")
    args = parser.parse_args(argv)
    shapes = [
        replace(case, name=name) for name, case in SHAPES.items() if not args.only or any(p in name for p in args.only)
    ]
    cases = [case for shape in shapes for case in candidates(shape)]
    results = {result["name"]: result for result in run_all(cases, args.jobs, args.budget)}
    entries, num_keys = best_entries(shapes, results)
    chips = {result["device"] for result in results.values() if "device" in result}
    for chip in chips:  # one, or none where nothing ran
        write_table(args.output or table_path(chip), chip, entries)
    print(f"{len(entries)} of {num_keys} keys have a right tile")
    return 0 if len(entries) == num_keys else 1


def best_entries(shapes: list[Case], results: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """(table entries, number of keys). Shapes with one key, such as equal and ragged lengths, share the best sum."""
    groups: dict[str, list[Case]] = {}
    for shape in shapes:
        groups.setdefault(json.dumps(table_key(shape.problem())), []).append(shape)
    entries = []
    for key, group in groups.items():
        totals: dict[Tile, float] = {}
        for options in zip(*map(candidates, group), strict=True):
            found = [results[case.name] for case in options]
            if all("us" in result and "error" not in result for result in found):
                totals[options[0].tile] = sum(result["us"] for result in found)
        if totals:
            best = min(totals, key=lambda tile: totals[tile])
            entries.append({"key": json.loads(key), "tile": dict(best), "us": round(totals[best] / len(group), 1)})
    return entries, len(groups)


def candidates(shape: Case) -> list[Case]:
    """Cases of the shape, one for each tile that fits."""
    problem = shape.problem()
    default = default_tile(problem)
    if is_wide(problem):
        grid = [{"overhead": overhead} for overhead in (1, 2, 3, 5)]
    else:
        grid = [
            {"block": block, "num_stages": stages, "overhead": overhead * 128 // block}
            for block, stages in ((128, 2), (128, 3), (64, 3), (64, 4))
            for overhead in (2, 4)
        ]
    tiles = [fields for fields in grid if _fits(problem, replace(default, **fields))]
    return [
        replace(shape, kind="time", name=f"{shape.name} {json.dumps(fields)}", tile=tuple(fields.items()))
        for fields in tiles
    ]


def _fits(problem: Any, tile: TileConfig) -> bool:
    return smem_bytes(problem, tile) <= SMEM_BYTES


def write_table(path: Path, chip: str, entries: list[dict[str, Any]]) -> None:
    """Replaces the entries with the same keys in the table at `path`, which need not exist, and keeps the others."""
    old = json.loads(path.read_text())["entries"] if path.exists() else []
    keys = [entry["key"] for entry in entries]
    kept = [entry for entry in old if entry["key"] not in keys]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"chip": chip, "entries": [*kept, *entries]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
