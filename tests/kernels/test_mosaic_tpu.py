"""The TPU kernel without a TPU: its arithmetic and its copies in Pallas' two interpreters, and that it lowers for TPUs.

Pallas' TPU interpreter runs copies and semaphores as they are written: scratch memory is NaN until it is filled, a copy
happens when it is waited for (`on_wait`) or at once (`eager`), and two accesses that nothing orders are a race. It
cannot reinterpret a buffer of bfloat16 as words, which the kernel does to tell grouped heads apart; those cases run in
the interpreter that knows arrays only, and their copies are those of the float32 cases.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # what it found is not public
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import PagedAttentionConfig, paged_attention, supports
from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, ArgSpec, PagedInputs, ancestor_bits, make_inputs
from kernels_pallas.paged_attention.mosaic_tpu import paged_attention_tpu
from kernels_pallas.paged_attention.mosaic_tpu_layout import TileConfig, default_tile
from tests.kernels.oracle import Expected, assert_rows_close, attend, attended_positions, check

KEY = jax.random.key(5)
GQA = ArgSpec(8, 2, 128, 128, False, 16, 2, (70, -1, 5, 126), scale=0.3, dtype="float32")
MLA = ArgSpec(8, 1, 192, 128, True, 16, 4, (70, -1, 5, 0), scale=0.1, dtype="float32")
TREE = replace(MLA, num_rows=5, committed_len=(30, -1, 0), tree_parents=(-1, 0, 0, 1, 2))
CHUNK = replace(GQA, num_rows=40, committed_len=(0, 33))


@dataclass(frozen=True)
class Attention:
    """The kernel in an interpreter, on blocks so small that a slot has several of them."""

    interpret: Any
    block_pages: int = 2
    tile_rows: int | None = None

    def __call__(self, *arrays: Any, config: PagedAttentionConfig) -> jax.Array:
        tile = TileConfig(self.block_pages, self.tile_rows or arrays[0].shape[1])
        return paged_attention_tpu(*arrays, config=config, tile=tile, interpret=self.interpret)


ARRAYS = Attention(interpret=True)
TPU = Attention(pltpu.InterpretParams(detect_races=True))
EAGER = Attention(pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"))


def races_found() -> bool:
    return bool(interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found)


@pytest.fixture(autouse=True)
def _interpreter_reset() -> Iterator[None]:
    """A fault may leave the interpreter in the middle of a kernel."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def check_tpu(spec: ArgSpec, inputs: PagedInputs | None = None, run: Attention = TPU) -> jax.Array:
    inputs = make_inputs(spec, KEY) if inputs is None else inputs
    out_BWHE = check(run, spec, inputs, backend="mosaic_tpu")
    assert not races_found()
    return out_BWHE


# --- the contract, on inputs in which all that must not be read is NaN


@pytest.mark.parametrize(
    ("spec", "run"), [(GQA, TPU), (GQA, EAGER), (MLA, TPU), (TREE, TPU)], ids=["gqa", "gqa, eager", "mla", "tree"]
)
def test_copies_and_races(spec: ArgSpec, run: Attention) -> None:
    check_tpu(spec, run=run)


@pytest.mark.parametrize(
    ("spec", "num_rows"),
    [
        *[pytest.param(MLA, rows, marks=[pytest.mark.long] * (rows % 2), id=f"mla-{rows}") for rows in range(1, 9)],
        *[pytest.param(GQA, rows, marks=[pytest.mark.long] * (1 - rows % 2), id=f"gqa-{rows}") for rows in range(1, 9)],
    ],
)
def test_every_number_of_rows(spec: ArgSpec, num_rows: int) -> None:
    lengths = (0, 32 - num_rows, 31, -1) if num_rows % 2 else (1, 16 - num_rows, 32)
    check_tpu(replace(spec, num_rows=num_rows, committed_len=lengths))


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_every_length_up_to_two_blocks(spec: ArgSpec) -> None:
    check_tpu(replace(spec, num_rows=2, committed_len=tuple(range(-1, 66))), run=ARRAYS)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(page_size: int) -> None:
    check_tpu(replace(MLA, page_size=page_size, committed_len=(0, 3, 127, 128, 300)))


@pytest.mark.parametrize("dead", [(-1, -1, 40, 3), (40, -1, -1, 3), (3, 40, -1, -1), (-1, 5, -1)])
def test_dead_slots_anywhere(dead: tuple[int, ...]) -> None:
    out_BWHE = np.asarray(check_tpu(replace(MLA, committed_len=dead)))
    assert not out_BWHE[np.array(dead) < 0].any()


@pytest.mark.parametrize("length", [-1, np.iinfo(np.int32).min])
def test_all_slots_dead(length: int) -> None:
    spec = replace(MLA, committed_len=(-1, -1))
    inputs = make_inputs(spec, KEY)._replace(committed_len_B=jnp.full(2, length, jnp.int32))
    assert not np.asarray(TPU(*inputs, config=spec.config("mosaic_tpu"))).any()
    assert not races_found()


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_chunks_in_tiles(spec: ArgSpec) -> None:
    """40 rows in tiles of 16: the last is not full, and the first of the next slot is copied ahead."""
    run = replace(TPU, tile_rows=16)
    check_tpu(replace(spec, num_rows=40, committed_len=(0, 33, -1, 100)), run=run)


def test_a_long_chunk_with_the_default_tile() -> None:
    spec = replace(CHUNK, num_q_heads=32, num_kv_heads=8, num_rows=256, committed_len=(70,))
    assert default_tile(spec.problem()).tile_rows < spec.num_rows
    run = functools.partial(paged_attention_tpu, interpret=True)
    check(run, spec, make_inputs(spec, KEY), backend="mosaic_tpu")


def test_random_ancestors() -> None:
    rng = np.random.default_rng(3)
    spec = replace(MLA, num_rows=8, committed_len=(0, 1, 15, 16, 100, 9), tree_parents=(-1,) * 8)
    inputs = make_inputs(spec, KEY)
    own_BW = ancestor_bits(spec.tree_parents or ())[None]
    lower_BW = rng.integers(0, 256, (6, 8), np.uint32) & (own_BW - 1)  # any subset of the rows before
    check_tpu(spec, inputs._replace(ancestor_bits_BW=jnp.asarray(lower_BW | own_BW)))


def test_32_rows_of_a_tree() -> None:
    parents = (-1, *(row // 2 for row in range(31)))
    check_tpu(replace(MLA, num_rows=32, committed_len=(40, 0), tree_parents=parents), run=ARRAYS)


def test_peaked_scores() -> None:
    check_tpu(replace(GQA, committed_len=(100, 65, 5), scale=30.0))


@pytest.mark.parametrize(
    ("spec", "poison"),
    [(TREE, np.nan), (replace(GQA, num_rows=5, committed_len=(14, 30)), np.nan), (TREE, np.inf)],
    ids=["tree", "gqa", "tree, inf"],
)
def test_poison_of_one_row_reaches_the_rows_that_attend_it_only(spec: ArgSpec, poison: float) -> None:
    inputs = make_inputs(spec, KEY)
    base = spec.committed_len[0]
    run = jax.jit(functools.partial(ARRAYS, config=spec.config("mosaic_tpu")))
    clean_BWHE = np.asarray(run(*inputs))
    for row in range(1, 5):
        at = (inputs.page_table_BP[0, (base + row) // 16], (base + row) % 16)
        poisoned = inputs._replace(k_pages_NZGC=inputs.k_pages_NZGC.at[at].set(poison))
        if inputs.v_pages_NZGE is not None:
            poisoned = poisoned._replace(v_pages_NZGE=inputs.v_pages_NZGE.at[at].set(poison))
        out_BWHE = np.asarray(run(*poisoned))
        attends_W = np.array([base + row in attended_positions(inputs, 0, other) for other in range(5)])
        assert not attends_W.all()
        np.testing.assert_array_equal(out_BWHE[0, ~attends_W], clean_BWHE[0, ~attends_W])
        assert np.isnan(out_BWHE[0, attends_W]).all()
        np.testing.assert_array_equal(out_BWHE[1:], clean_BWHE[1:])


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_nan_in_keys_or_values_alone_does_not_leak(kind: str) -> None:
    spec = replace(GQA, num_rows=3, committed_len=(14, 0, -1))
    inputs = make_inputs(spec, KEY)
    assert inputs.v_pages_NZGE is not None
    if kind == "keys":
        inputs = inputs._replace(v_pages_NZGE=jnp.nan_to_num(inputs.v_pages_NZGE, nan=0.5))
    else:
        inputs = inputs._replace(k_pages_NZGC=jnp.nan_to_num(inputs.k_pages_NZGC, nan=0.5))
    check_tpu(spec, inputs, ARRAYS)


@pytest.mark.parametrize("stray", [-1, -(2**31), 11, 2**31 - 1])
def test_a_page_id_that_does_not_exist_is_read_as_the_null_page(stray: int) -> None:
    spec = replace(MLA, num_rows=2, committed_len=(40, 17))
    inputs = make_inputs(spec, KEY)
    assert stray < 0 or stray >= inputs.k_pages_NZGC.shape[0]
    with_null = inputs._replace(
        k_pages_NZGC=inputs.k_pages_NZGC.at[0].set(0.5), page_table_BP=inputs.page_table_BP.at[0, 1].set(stray)
    )
    check_tpu(spec, with_null)


@pytest.mark.parametrize("length", [111, 112, 2**31 - 1])
def test_a_length_past_the_table_attends_the_table(length: int) -> None:
    spec = replace(MLA, num_rows=3, committed_len=(100, 5), num_unused_entries=0)
    inputs = make_inputs(spec, KEY)
    filled = inputs._replace(
        k_pages_NZGC=jnp.nan_to_num(inputs.k_pages_NZGC, nan=0.25),
        committed_len_B=jnp.array([min(length, 300), 5], jnp.int32),
    )
    expected = attend(filled, spec.config("mosaic_tpu"))
    given = filled._replace(committed_len_B=jnp.array([length, 5], jnp.int32))
    assert_rows_close(TPU(*given, config=spec.config("mosaic_tpu")), expected)


def test_rows_do_not_depend_on_how_many_there_are() -> None:
    spec = replace(MLA, num_rows=4, committed_len=(0, 13, 60))
    inputs = make_inputs(spec, KEY)
    expected = attend(inputs, spec.config("mosaic_tpu"))
    for row in range(4):
        alone = inputs._replace(
            q_BWHC=inputs.q_BWHC[:, row : row + 1], committed_len_B=inputs.committed_len_B + jnp.int32(row)
        )
        narrow_BWHE = ARRAYS(*alone, config=spec.config("mosaic_tpu"))
        assert_rows_close(narrow_BWHE, Expected(*(part[:, row : row + 1] for part in expected)))


# --- bfloat16, held to FlashMLA's criterion as well


def assert_near(actual: jax.Array, expected_BWHE: np.ndarray) -> None:
    """Each element within 8e-4, or 2.01/128 of its size; cosine distance of the whole below 5e-6."""
    actual_BWHE = np.asarray(actual, np.float64)
    error_BWHE = np.abs(actual_BWHE - expected_BWHE)
    assert ((error_BWHE <= 8e-4) | (error_BWHE <= np.abs(expected_BWHE) * (2.01 / 128))).all(), error_BWHE.max()
    norm = (actual_BWHE**2 + expected_BWHE**2).sum()
    assert 1 - 2 * (actual_BWHE * expected_BWHE).sum() / norm < 5e-6


@pytest.mark.parametrize(
    "spec",
    [
        replace(MLA, dtype="bfloat16", committed_len=(200, -1, 300)),
        replace(ARG_SPECS["mla_16_edges_page_64"], committed_len=(250, 380, -1)),
        replace(GQA, dtype="bfloat16", committed_len=(200, -1, 300)),
        replace(GQA, dtype="bfloat16", num_q_heads=32, num_kv_heads=8, num_rows=3, committed_len=(256, 90)),
    ],
    ids=["mla", "mla 576", "gqa", "gqa 32/8"],
)
def test_bfloat16(spec: ArgSpec) -> None:
    # That criterion is made for scores that are nearly alike: where one weight is large, rounding it to bf16 is seen.
    flat = replace(spec, scale=spec.scale / 10)
    inputs = make_inputs(flat, KEY)
    assert_near(
        check_tpu(flat, inputs, TPU if spec.is_latent else ARRAYS), attend(inputs, flat.config("mosaic_tpu")).out_BWHE
    )


# --- random cases


def random_spec(seed: int) -> ArgSpec:
    rng = np.random.default_rng(seed)
    num_kv_heads = int(rng.choice([1, 1, 2, 4, 8]))
    is_latent = bool(num_kv_heads == 1 and rng.integers(2))
    channels = int(rng.choice([64, 128, 192])) if num_kv_heads == 1 else 128
    num_rows = int(rng.integers(1, 9))
    page_size = int(rng.choice([16, 32, 64, 128]))
    lengths = [int(rng.integers(0, 4 * page_size)) for _ in range(rng.integers(1, 5))]
    edges = [0, 1, page_size - num_rows, page_size - 1, page_size, 2 * page_size - num_rows, -1]
    parents = (-1, *(int(rng.integers(0, row)) for row in range(1, num_rows)))
    return ArgSpec(
        num_q_heads=num_kv_heads * int(rng.choice([1, 2, 3, 4, 8])),
        num_kv_heads=num_kv_heads,
        k_channels=channels,
        v_channels=int(rng.choice([64, channels])) if num_kv_heads == 1 and channels > 64 else channels,
        is_latent=is_latent,
        page_size=page_size,
        num_rows=num_rows,
        committed_len=(*lengths, int(rng.choice(edges)), int(rng.choice(edges))),
        scale=float(rng.choice([0.05, 0.3, 3.0])),
        tree_parents=parents if rng.integers(2) else None,
        dtype=str(rng.choice(["float32", "bfloat16"])),
    )


def check_random(seed: int) -> None:
    spec = random_spec(seed)
    assert supports("mosaic_tpu", spec.problem()) is None
    rng = np.random.default_rng(seed)
    words = spec.dtype == "bfloat16" and spec.num_kv_heads > 1
    run = replace(
        ARRAYS if words else TPU,
        block_pages=int(rng.integers(1, 4)),
        tile_rows=None if spec.tree_parents else int(rng.integers(1, spec.num_rows + 1)),
    )
    check_tpu(spec, make_inputs(spec, jax.random.key(seed)), run)


@pytest.mark.parametrize("seed", range(3))
def test_random_cases(seed: int) -> None:
    check_random(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 206))
def test_many_random_cases(seed: int) -> None:
    check_random(seed)


# --- what the compiler is given


def lowered_text(call: Callable[..., jax.Array], *arrays: jax.Array | None) -> str:
    """The program for a TPU v5e that is not here."""
    v5e = jax.sharding.AbstractDevice(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=v5e)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(call).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    "spec", [GQA, replace(GQA, dtype="bfloat16"), MLA, TREE, CHUNK], ids=["gqa", "bf16", "mla", "tree", "chunk"]
)
def test_the_lowered_program_is_the_kernel_and_nothing_else(spec: ArgSpec) -> None:
    inputs = make_inputs(spec, KEY)
    text = lowered_text(functools.partial(paged_attention, config=spec.config("mosaic_tpu")), *inputs)
    assert text.count("stablehlo.custom_call") == 1
    assert text.count('kernel_name = "paged_attention_tpu"') == 1
    for operation in ("dot_general", "gather", "scatter", "while", "exponential"):
        assert f"stablehlo.{operation}" not in text
    other = lowered_text(functools.partial(paged_attention, config=spec.config("reference")), *inputs)
    assert "custom_call" not in other
    assert "stablehlo.gather" in other


# --- what it cannot do, and what is wrong with a call


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "pages are float16"),
        ({"page_size": 8, "dtype": "bfloat16"}, "pages hold 8"),
        ({"page_size": 4}, "pages hold 4"),
        ({"k_channels": 80, "v_channels": 80}, "multiples of 64"),
        ({"k_channels": 64, "v_channels": 64}, "64 key and 64 value channels in 2 heads"),
        ({"k_channels": 256, "v_channels": 256}, "256 key and 256 value channels in 2 heads"),
        ({"num_kv_heads": 3, "num_q_heads": 9, "dtype": "bfloat16"}, "3 key heads"),
        ({"num_rows": 33, "tree_parents": (-1,) * 33}, "33 rows with ancestor bits"),
        ({"num_unused_entries": 50_000}, "bytes; at most 524288"),
        ({"num_q_heads": 8192}, "bytes of VMEM"),
    ],
)
def test_says_what_it_cannot_do(change: dict[str, Any], reason: str) -> None:
    spec = replace(GQA, **change)
    assert reason in (supports("mosaic_tpu", spec.problem()) or "")


def test_what_it_cannot_do_is_refused() -> None:
    spec = replace(GQA, page_size=8, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="backend 'mosaic_tpu' cannot do this: pages hold 8 positions"):
        paged_attention(*make_inputs(spec, KEY), config=spec.config("mosaic_tpu"))


@pytest.mark.parametrize("name", ["gqa_32_8_uniform_4_rows", "mla_16_ragged_4_rows", "mla_128_uniform_4_rows"])
def test_says_what_it_can_do(name: str) -> None:
    assert supports("mosaic_tpu", ARG_SPECS[name].problem()) is None


def test_verify_rows_share_what_is_copied() -> None:
    for num_rows in range(1, 9):
        problem = replace(ARG_SPECS["mla_128_uniform"], num_rows=num_rows).problem()
        assert default_tile(problem).tile_rows == num_rows


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"committed_len_B": jnp.array([300, 5], jnp.int32)}, "the page table ends at position"),
        ({"page_table_BP": jnp.array([[1, 99, 2, 3, 4, 5]] * 2, jnp.int32)}, "is page 99"),
    ],
)
def test_debug_catches_wrong_values_and_without_it_they_are_harmless(
    change: dict[str, jax.Array], sentence: str
) -> None:
    spec = replace(MLA, committed_len=(40, 5), num_unused_entries=3)
    wrong = make_inputs(spec, KEY)._replace(**change)
    with pytest.raises(ValueError, match=sentence):
        paged_attention(*wrong, config=spec.config("mosaic_tpu", debug=True))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):  # an access out of bounds would raise
        paged_attention(*wrong, config=spec.config("mosaic_tpu"))
