"""Every backend does what the contract says, on inputs in which all else is poison."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import BACKENDS, select_backend, supports
from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, ArgSpec, PagedInputs, ancestor_bits, make_inputs
from tests.kernels.oracle import Expected, assert_rows_close, attend, attended_positions, check, jitted

KEY = jax.random.key(7)
SMALL = [name for name, spec in ARG_SPECS.items() if spec.kv_bytes < 16 << 20]
MLA = replace(ARG_SPECS["mla_8_edges"], dtype="float32")
GQA = replace(ARG_SPECS["mqa_8_edges"], num_kv_heads=2, dtype="float32")


@pytest.fixture(params=sorted({"reference", select_backend("auto", jax.default_backend())}))
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def run_case(backend: str, spec: ArgSpec, inputs: PagedInputs | None = None) -> jax.Array:
    assert supports(backend, spec.problem()) is None
    return check(jitted, spec, make_inputs(spec, KEY) if inputs is None else inputs, backend=backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SMALL)
def test_named_shapes(backend: str, name: str, dtype: str) -> None:
    run_case(backend, replace(ARG_SPECS[name], dtype=dtype))


@pytest.mark.parametrize("num_rows", range(1, 9))
@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_every_number_of_rows(backend: str, spec: ArgSpec, num_rows: int) -> None:
    run_case(backend, replace(spec, num_rows=num_rows, committed_len=(0, 1, 16 - num_rows, 15, 16, 47, -1)))


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_every_length_up_to_three_pages(backend: str, spec: ArgSpec) -> None:
    run_case(backend, replace(spec, num_rows=2, committed_len=tuple(range(-1, 50))))


@pytest.mark.parametrize("page_size", [1, 8, 32, 64, 128, 256])
def test_page_sizes(backend: str, page_size: int) -> None:
    run_case(backend, replace(MLA, page_size=page_size, committed_len=(0, 3, 127, 128, 300)))


@pytest.mark.parametrize("num_rows", [31, 256])
def test_prefill_chunks(backend: str, num_rows: int) -> None:
    run_case(backend, replace(GQA, num_rows=num_rows, committed_len=(0, 100)))


def test_random_ancestors(backend: str) -> None:
    rng = np.random.default_rng(3)
    spec = replace(MLA, num_rows=8, committed_len=(0, 1, 15, 16, 200, 9), tree_parents=(-1,) * 8)
    inputs = make_inputs(spec, KEY)
    own_BW = ancestor_bits(spec.tree_parents or ())[None]
    lower_BW = rng.integers(0, 256, (6, 8), np.uint32) & (own_BW - 1)  # any subset of the rows before
    run_case(backend, spec, inputs._replace(ancestor_bits_BW=jnp.asarray(lower_BW | own_BW)))


def test_more_than_eight_rows_of_a_tree(backend: str) -> None:
    parents = (-1, *(row // 2 for row in range(31)))
    run_case(backend, replace(MLA, num_rows=32, committed_len=(40, 0), tree_parents=parents))


def test_rows_do_not_depend_on_how_many_there_are(backend: str) -> None:
    spec = replace(MLA, num_rows=8, committed_len=(0, 13, 200))
    inputs = make_inputs(spec, KEY)
    expected = attend(inputs, spec.config(backend))
    wide_BWHE = np.asarray(run_case(backend, spec, inputs))
    for row in range(8):
        alone = inputs._replace(
            q_BWHC=inputs.q_BWHC[:, row : row + 1], committed_len_B=inputs.committed_len_B + jnp.int32(row)
        )
        narrow_BWHE = jitted(*alone, config=spec.config(backend))
        np.testing.assert_allclose(narrow_BWHE, wide_BWHE[:, row : row + 1], rtol=0, atol=2e-6)
        assert_rows_close(narrow_BWHE, Expected(*(part[:, row : row + 1] for part in expected)))


def test_peaked_scores(backend: str) -> None:
    spec = replace(GQA, committed_len=(200, 129, 5), scale=30.0)
    run_case(backend, spec)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_poison_of_one_row_reaches_the_rows_that_attend_it_only(
    backend: str, spec: ArgSpec, is_tree: bool, poison: float
) -> None:
    parents = (-1, 0, 0, 1, 2) if is_tree else None
    spec = replace(spec, num_rows=5, committed_len=(14, 30), tree_parents=parents)
    inputs = make_inputs(spec, KEY)
    clean_BWHE = np.asarray(run_case(backend, spec, inputs))
    for row in range(1, 5):
        position = 14 + row
        at = (inputs.page_table_BP[0, position // 16], position % 16)
        poisoned = inputs._replace(k_pages_NZGC=inputs.k_pages_NZGC.at[at].set(poison))
        if inputs.v_pages_NZGE is not None:
            poisoned = poisoned._replace(v_pages_NZGE=inputs.v_pages_NZGE.at[at].set(poison))
        out_BWHE = np.asarray(jitted(*poisoned, config=spec.config(backend)))
        attends_W = np.array([position in attended_positions(inputs, 0, other) for other in range(5)])
        assert not attends_W.all()
        np.testing.assert_array_equal(out_BWHE[0, ~attends_W], clean_BWHE[0, ~attends_W])
        assert np.isnan(out_BWHE[0, attends_W]).all()
        np.testing.assert_array_equal(out_BWHE[1], clean_BWHE[1])


def test_dead_slots_are_zero_and_disturb_nobody(backend: str) -> None:
    spec = replace(MLA, committed_len=(-1, 20, -1))
    out_BWHE = run_case(backend, spec)
    assert not np.asarray(out_BWHE[jnp.array([0, 2])]).any()
    all_dead = make_inputs(replace(MLA, committed_len=(-1, -1)), KEY)
    assert not np.asarray(jitted(*all_dead, config=spec.config(backend))).any()
    very_dead = all_dead._replace(committed_len_B=jnp.full(2, jnp.iinfo(jnp.int32).min, jnp.int32))
    assert not np.asarray(jitted(*very_dead, config=spec.config(backend))).any()


@pytest.mark.parametrize("stray", [-1, -(2**31), 11, 2**31 - 1])
def test_a_page_id_that_does_not_exist_is_read_as_the_null_page(backend: str, stray: int) -> None:
    spec = replace(MLA, num_rows=2, committed_len=(40, 17))
    inputs = make_inputs(spec, KEY)
    assert stray < 0 or stray >= inputs.k_pages_NZGC.shape[0]
    with_null = inputs._replace(
        k_pages_NZGC=inputs.k_pages_NZGC.at[0].set(0.5), page_table_BP=inputs.page_table_BP.at[0, 1].set(stray)
    )
    run_case(backend, spec, with_null)


@pytest.mark.parametrize("length", [111, 112, 113, 200, 2**31 - 1])
def test_a_length_past_the_table_attends_the_table(backend: str, length: int) -> None:
    spec = replace(MLA, num_rows=3, committed_len=(100, 5), num_unused_entries=0)
    inputs = make_inputs(spec, KEY)
    assert inputs.page_table_BP.shape[1] * spec.page_size == 112
    filled = inputs._replace(
        k_pages_NZGC=jnp.nan_to_num(inputs.k_pages_NZGC, nan=0.25),
        committed_len_B=jnp.array([min(length, 300), 5], jnp.int32),
    )
    expected = attend(filled, spec.config(backend))
    given = filled._replace(committed_len_B=jnp.array([length, 5], jnp.int32))
    assert_rows_close(jitted(*given, config=spec.config(backend)), expected)


def test_every_backend_reads_lengths_on_the_device() -> None:
    assert all(entry.supports_device_lengths for entry in BACKENDS.values())
