"""A bar for the longest wait there is: an engine compiling its programs. On stderr, and only on a terminal."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

from tqdm import tqdm

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.shapes import PrefillShape, ShapeGrid, StepShape
from mtp_jax.engine.launch import OnShape
from mtp_jax.models.api import ModelFamily
from mtp_jax.proposers.registry import resolve_method


@contextmanager
def compile_bar(family: ModelFamily, config: EngineConfig, label: str = "compiling") -> Generator[OnShape]:
    """What an `Engine` of this configuration takes as `on_shape`: one step of the bar for each program."""
    with tqdm(total=num_programs(family, config), desc=label, unit="program", disable=None) as bar:

        def on_shape(shape: StepShape | PrefillShape) -> None:
            bar.set_postfix_str(_named(shape), refresh=False)
            bar.update()

        yield on_shape


def num_programs(family: ModelFamily, config: EngineConfig) -> int:
    """How many programs an engine of this configuration compiles at start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine gives the same warning
        _, max_draft_len = resolve_method(config.speculative, family)
    grid = ShapeGrid.of(config)
    return len(grid.all_prefills()) + len(grid.slot_buckets) * (max_draft_len + 1)


def _named(shape: StepShape | PrefillShape) -> str:
    if isinstance(shape, StepShape):
        return f"{shape.slots} slots, {shape.draft_len} drafts"
    return f"{shape.chunk} prompt tokens"
