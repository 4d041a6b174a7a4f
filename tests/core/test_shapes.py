"""The one place where a bucket is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import EngineConfig, SpeculativeConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.core.shapes import PrefillShape, ShapeGrid, StepShape


def config(max_num_seqs: int = 8, kmax: int = 3, chunk: int = 256, max_model_len: int = 512) -> EngineConfig:
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefill_chunk=chunk,
        speculative=SpeculativeConfig(num_speculative_tokens=kmax),
    )


@given(max_num_seqs=st.integers(1, 300), kmax=st.integers(0, 7), chunk=st.integers(1, 600), data=st.data())
def test_the_chosen_shape_is_the_smallest_of_the_grid_that_fits(
    max_num_seqs: int, kmax: int, chunk: int, data: st.DataObject
) -> None:
    grid = ShapeGrid.of(config(max_num_seqs, kmax, chunk))
    num_slots = data.draw(st.integers(1, max_num_seqs))
    draft_len = data.draw(st.integers(0, kmax))
    shape = grid.choose(num_slots, draft_len)
    assert shape in grid.all_steps()
    assert shape.draft_len == draft_len
    assert shape.slots == min(s.slots for s in grid.all_steps() if s.slots >= num_slots)
    num_tokens = data.draw(st.integers(1, 700))
    prefill = grid.choose_prefill(num_tokens)
    assert prefill in grid.all_prefills()
    fitting = [s.chunk for s in grid.all_prefills() if s.chunk >= num_tokens]
    assert prefill.chunk == (min(fitting) if fitting else max(s.chunk for s in grid.all_prefills()))


@given(max_num_seqs=st.integers(1, 300), kmax=st.integers(0, 7), chunk=st.integers(1, 600))
def test_shapes_differ_and_cover_every_draft_length(max_num_seqs: int, kmax: int, chunk: int) -> None:
    grid = ShapeGrid.of(config(max_num_seqs, kmax, chunk))
    steps, prefills = grid.all_steps(), grid.all_prefills()
    assert len(set(steps)) == len(steps) == len(grid.slot_buckets) * (kmax + 1)
    assert len(set(prefills)) == len(prefills)
    assert max(s.slots for s in steps) == max_num_seqs
    assert max(s.chunk for s in prefills) == min(chunk, 512)


def test_no_chunk_is_longer_than_the_longest_text() -> None:
    assert ShapeGrid.of(config(chunk=256, max_model_len=40)).all_prefills() == (PrefillShape(16), PrefillShape(40))


@pytest.mark.parametrize(("num_slots", "draft_len"), [(9, 0), (1, 4), (1, -1)])
def test_what_is_outside_the_grid_is_our_fault(num_slots: int, draft_len: int) -> None:
    with pytest.raises(InvariantError):
        ShapeGrid.of(config()).choose(num_slots, draft_len)


def test_equal_shapes_are_one_key() -> None:
    assert {StepShape(1, 2): "x"}[StepShape(1, 2)] == "x"
