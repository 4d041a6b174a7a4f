"""Grouped matmul: every backend does what the contract says; the Hopper kernel in the interpreter and lowered."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import bench_grouped
from kernels_pallas.grouped_matmul import Problem, grouped_matmul, mosaic_gpu, supports
from kernels_pallas.grouped_matmul.mosaic_gpu import TileConfig, num_places, place_rows
from kernels_pallas.grouped_matmul.reference import grouped_matmul_reference

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason=f"jax {jax.__version__} has no public interpreter for Mosaic GPU"
)

COUNTS = {
    "few rows, an idle expert, 70 in one": (3, 0, 70, 8, 1),
    "one expert has all": (0, 20, 0),
    "all idle": (0, 0),
    "rows behind the last expert's": (5, 2),
}
NUM_SPARE = {"rows behind the last expert's": 6, "all idle": 3}


def inputs(counts: tuple[int, ...], num_spare: int = 0, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random rows, and weights that are NaN for every expert without rows."""
    rng = np.random.default_rng(seed)
    x_PD = jnp.asarray(rng.normal(size=(sum(counts) + num_spare, 128)), jnp.bfloat16)
    w_XDF = np.asarray(rng.normal(size=(len(counts), 128, 256)), np.float32)
    w_XDF[[expert for expert, count in enumerate(counts) if not count]] = np.nan
    return x_PD, jnp.asarray(w_XDF, jnp.bfloat16), jnp.asarray(counts, jnp.int32)


def check(run: Any, counts: tuple[int, ...], num_spare: int = 0, seed: int = 0) -> None:
    """Each row against float64; rows behind the last expert's are zero."""
    x_PD, w_XDF, num_rows_X = inputs(counts, num_spare, seed)
    out_PF = np.asarray(run(x_PD, w_XDF, num_rows_X), np.float64)
    expert_P = np.repeat(np.arange(len(counts)), counts)
    expected_PF = np.zeros(out_PF.shape)
    for row, expert in enumerate(expert_P):
        expected_PF[row] = np.asarray(x_PD[row], np.float64) @ np.asarray(w_XDF[expert], np.float64)
    limit_P1 = 2.0**-8 * np.linalg.norm(expected_PF, axis=1, keepdims=True)
    assert (np.linalg.norm(out_PF - expected_PF, axis=1, keepdims=True) <= limit_P1).all()


def run_kernel(*arrays: jax.Array, num_ctas: int = 3, out_block: int = 128) -> jax.Array:
    tile = TileConfig(num_stages=2, num_ctas=num_ctas, out_block=out_block)
    return mosaic_gpu.grouped_matmul_gpu(*arrays, tile=tile, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("name", COUNTS)
def test_the_reference(name: str) -> None:
    def run(x_PD: jax.Array, w_XDF: jax.Array, num_rows_X: jax.Array) -> jax.Array:
        return grouped_matmul(x_PD, jnp.nan_to_num(w_XDF), num_rows_X, backend="reference")

    check(run, COUNTS[name], NUM_SPARE.get(name, 0))


@needs_interpreter
@pytest.mark.parametrize("name", COUNTS)
def test_the_kernel(name: str) -> None:
    check(run_kernel, COUNTS[name], NUM_SPARE.get(name, 0))


@needs_interpreter
@pytest.mark.parametrize("num_ctas", [1, 7])
@pytest.mark.parametrize("out_block", [128, 256])
def test_any_number_of_ctas_and_columns(num_ctas: int, out_block: int) -> None:
    check(functools.partial(run_kernel, num_ctas=num_ctas, out_block=out_block), (1, 9, 0, 4))


@needs_interpreter
@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_random_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = tuple(int(count) for count in rng.integers(0, 12, rng.integers(1, 9)) * (rng.random() < 0.7))
    check(run_kernel, counts, int(sum(counts) == 0) + int(rng.integers(0, 5)), seed)


@pytest.mark.parametrize("counts", [(3, 0, 70, 8, 1), (0, 0), (1,) * 20, (0, 64, 0, 65)])
def test_places_are_apart_and_experts_begin_at_multiples_of_eight(counts: tuple[int, ...]) -> None:
    problem = Problem(sum(counts) + 2, len(counts), 128, 128, "bfloat16")
    placement = place_rows(problem, jnp.asarray(counts, jnp.int32))
    place_P = np.asarray(placement.place_P)
    assert len(set(place_P[: sum(counts)])) == sum(counts)
    assert (place_P[sum(counts) :] == num_places(problem) - 1).all()
    assert int(placement.num_active[0]) == sum(count > 0 for count in counts)
    first = 0
    for expert, count in enumerate(counts):
        at = np.asarray(placement.expert_X).tolist().index(expert)
        assert int(placement.rows_X[at]) == count
        if count:
            start = int(placement.start_X[at])
            assert start % 8 == 0
            assert place_P[first : first + count].tolist() == list(range(start, start + count))
            assert start + -(-count // 64) * 64 <= num_places(problem)
        first += count


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"jax {jax.__version__} lowers no Mosaic GPU kernel of ours: it takes 0.11"
)
def test_lowers_for_cuda_to_the_kernel_and_no_product() -> None:
    arguments = inputs((3, 0, 70, 8, 1))
    call = functools.partial(grouped_matmul, backend="mosaic_gpu")
    text = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"(grouped_matmul\w*?)_mosaic_gpu\b", text)) == {"grouped_matmul"}
    assert "dot" not in re.findall(r"stablehlo\.(\w+)|chlo\.(\w+)", text)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem(4, 2, 128, 256, "float32"), "weights are float32"),
        (Problem(4, 2, 100, 256, "bfloat16"), "100 channels in"),
        (Problem(4, 2, 128, 192, "bfloat16"), "192 out"),
    ],
)
def test_says_what_it_cannot_do(problem: Problem, reason: str) -> None:
    if jax.__version_info__ < (0, 11):
        reason = "need 0.11 or newer"
    assert reason in (supports("mosaic_gpu", problem) or "")


@pytest.mark.parametrize(
    ("shapes", "dtype", "sentence"),
    [
        (((4, 8), (2, 9, 3), (2,)), "float32", "x has shape"),
        (((4, 8), (2, 8, 3), (3,)), "float32", "num_rows has shape"),
        (((4, 8), (2, 8, 3), (2,)), "int32", "x is int32"),
    ],
)
def test_arrays_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], dtype: str, sentence: str) -> None:
    x, w = (jnp.zeros(shape, dtype) for shape in shapes[:2])
    with pytest.raises(ValueError, match=sentence):
        grouped_matmul(x, w, jnp.zeros(shapes[2], jnp.int32), backend="reference")


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="'triton'; it must be one of 'reference', 'mosaic_gpu'"):
        supports("triton", Problem(4, 2, 128, 256, "bfloat16"))


# --- faults that the tests above would find


class _NoWait:
    """Mosaic GPU in which nobody waits for rows and weights."""

    def __getattr__(self, name: str) -> object:
        return getattr(plgpu, name)

    def barrier_wait(self, barrier: Any) -> None:
        if getattr(barrier, "ref", barrier).dtype.num_arrivals != 2:
            plgpu.barrier_wait(barrier)


def _shifted(problem: Problem, num_rows_X: jax.Array, original=mosaic_gpu.place_rows) -> mosaic_gpu.Placement:
    placement = original(problem, num_rows_X)
    return placement._replace(start_X=placement.start_X + 8)


def _next_expert(problem: Problem, num_rows_X: jax.Array, original=mosaic_gpu.place_rows) -> mosaic_gpu.Placement:
    placement = original(problem, num_rows_X)
    return placement._replace(expert_X=jnp.roll(placement.expert_X, 1))


def _one_active_less(problem: Problem, num_rows_X: jax.Array, original=mosaic_gpu.place_rows) -> mosaic_gpu.Placement:
    placement = original(problem, num_rows_X)
    return placement._replace(num_active=placement.num_active - 1)


MUTANTS = {
    "rows of the wrong places": ("place_rows", _shifted),
    "weights of another expert": ("place_rows", _next_expert),
    "the last active expert is left out": ("place_rows", _one_active_less),
    "nobody waits for rows and weights": ("plgpu", _NoWait()),
}


@needs_interpreter
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, interpreter_reset: None) -> None:
    from kernels_pallas.grouped_matmul import mosaic_gpu_kernel

    attribute, fault = MUTANTS[name]
    monkeypatch.setattr(mosaic_gpu if attribute == "place_rows" else mosaic_gpu_kernel, attribute, fault)
    with pytest.raises((AssertionError, RuntimeError)):
        check(run_kernel, (3, 5, 2))


def test_the_reference_is_xlas_ragged_product() -> None:
    x_PD, w_XDF, num_rows_X = inputs((2, 3))
    np.testing.assert_array_equal(
        grouped_matmul_reference(x_PD, w_XDF, num_rows_X)[:2], (x_PD[:2] @ w_XDF[0]).astype(jnp.bfloat16)
    )


def test_the_benchmark_counts_the_weights_of_active_experts() -> None:
    shape = bench_grouped.Shape("", num_tokens=5, num_experts=7, num_chosen=2, in_channels=64, out_channels=128)
    counts = bench_grouped.draw_counts(shape, 1)
    assert counts.sum() == 10
    assert counts.max() <= 5
    assert bench_grouped.weight_bytes(shape, counts) == sum(count > 0 for count in counts.tolist()) * 64 * 128 * 2
