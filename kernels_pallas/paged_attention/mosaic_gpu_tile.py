"""How the Hopper kernels cut their work: what fits, what is the default, and what was measured to be best.

Measured configurations lie beside this file, one table a chip: `tuning/<chip>.json`, written by
`python -m kernels_pallas.tune`. A call whose key stands in the table of the chip it is compiled for takes that entry;
any other takes `default_tile`.
"""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernels_pallas.paged_attention.contract import Problem
from kernels_pallas.paged_attention.mosaic_gpu_schedule import TILE

SMEM_BYTES = 232_448  # shared memory that one CTA can have on Hopper
MAX_NARROW = 256  # value channels whose sums one warpgroup's registers hold
MOST_TURNED = 32  # packed rows whose sums one warpgroup's registers hold, whatever the value channels
_RING_BYTES = 128 * 1024  # blocks in flight: more did not help
_TABLES = Path(__file__).parent / "tuning"


@dataclass(frozen=True)
class TileConfig:
    """How the work is cut: `block` positions a step, `num_stages` blocks in flight; the rest as in `Layout`."""

    block: int
    num_stages: int
    overhead: int
    min_share: int = 2
    slack: int = 0
    num_ctas: int = 132


def is_wide(problem: Problem) -> bool:
    """Whether the values of 64 rows need two warpgroups' registers."""
    return problem.v_channels > MAX_NARROW


def is_turned(problem: Problem) -> bool:
    """Whether the kernel of `mosaic_gpu_turned` does it: wide latent values, and few packed rows."""
    return is_wide(problem) and problem.num_rows * problem.num_q_heads // problem.num_kv_heads <= MOST_TURNED


def smem_bytes(problem: Problem, tile: TileConfig) -> int:
    """Shared memory that the kernel takes, each buffer rounded up to the alignment that TMA wants."""
    if is_turned(problem):
        queries_and_weights = MOST_TURNED * (problem.k_channels + 64) * 2
        return queries_and_weights + tile.num_stages * tile.block * problem.k_channels * 2 + 6 * 1024
    per_stage = tile.block * (problem.k_channels + (0 if problem.is_latent else problem.v_channels)) * 2
    query = TILE * max(problem.k_channels, 0 if is_wide(problem) else problem.v_channels) * 2
    return query + tile.num_stages * per_stage + 3 * 1024


def default_tile(problem: Problem) -> TileConfig:
    """Blocks of 128 positions in a ring of 128 KB (one for wide latent values), or what else fits."""
    if is_turned(problem):
        return TileConfig(block=64, num_stages=2, overhead=4, slack=6)
    if is_wide(problem):
        return TileConfig(block=128, num_stages=1, overhead=3, slack=6)
    stage_bytes = 128 * (problem.k_channels + (0 if problem.is_latent else problem.v_channels)) * 2
    tiles = [TileConfig(block=128, num_stages=min(max(_RING_BYTES // stage_bytes, 2), 6), overhead=4)]
    tiles += [TileConfig(block=64, num_stages=stages, overhead=3) for stages in (4, 3, 2)]
    return next((tile for tile in tiles if smem_bytes(problem, tile) <= SMEM_BYTES), tiles[-1])


def table_key(problem: Problem) -> dict[str, Any]:
    """What a table's entries are found by: dtype, G, H/G, C, E, Z and W."""
    return {
        "dtype": problem.dtype,
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.num_q_heads // problem.num_kv_heads,
        "k_channels": problem.k_channels,
        "v_channels": problem.v_channels,
        "page_size": problem.page_size,
        "num_rows": problem.num_rows,
    }


def table_path(chip: str) -> Path:
    """Where the chip's table lies.

    >>> table_path("NVIDIA H200").name
    'nvidia_h200.json'
    """
    return _TABLES / f"{chip.lower().replace(' ', '_')}.json"


def tuned_tile(problem: Problem, chip: str) -> TileConfig:
    """The measured best, where the chip's table has the problem's key, else the default."""
    key = table_key(problem)
    for entry in _read_table(table_path(chip)):
        if entry["key"] == key:
            tile = replace(default_tile(problem), **entry["tile"])
            if smem_bytes(problem, tile) > SMEM_BYTES:
                raise ValueError(f"{table_path(chip).name} has a tile for {key} that does not fit: {tile}.")
            return tile
    return default_tile(problem)


@functools.cache
def _read_table(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text())["entries"]) if path.exists() else ()
