"""Streamed linear products: every backend does what the contract says; the Hopper kernel interpreted and lowered."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import bench_linear
from kernels_pallas.streamed_linear import Form, Problem, streamed_linear, supports
from kernels_pallas.streamed_linear.mosaic_gpu import TileConfig, default_tile, linear_gpu, padded_rows
from kernels_pallas.streamed_linear.reference import linear_reference

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason=f"jax {jax.__version__} has no public interpreter for Mosaic GPU"
)
needs_lowering = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"jax {jax.__version__} lowers no Mosaic GPU kernel of ours: it takes 0.11"
)

NORM = Form(norm_eps=1e-5)
GATED = Form(norm_eps=1e-5, is_gated=True)
LOGITS = Form(is_out_major=True, out_dtype="float32")
CASES: dict[str, tuple[Form, tuple[int, int, int], bool, TileConfig]] = {
    "plain, three items a cluster": (Form(), (3, 128, 320), False, TileConfig(128, 64, 1, 2, 2)),
    "norm, two CTAs": (NORM, (5, 512, 128), False, TileConfig(64, 64, 2, 3, 1)),
    "residual, two CTAs": (Form(), (8, 256, 128), True, TileConfig(128, 64, 2, 2, 2)),
    "gated, norm": (GATED, (16, 128, 64), False, TileConfig(64, 128, 1, 3, 2)),
    "gated, norm, residual, two CTAs": (GATED, (1, 256, 64), True, TileConfig(64, 128, 2, 3, 2)),
    "logits, two items": (LOGITS, (1, 128, 256), False, TileConfig(64, 128, 1, 2, 1)),
    "rows beyond a group": (Form(), (11, 128, 64), True, TileConfig(128, 64, 1, 2, 2)),
}


def inputs(form: Form, sizes: tuple[int, int, int], *, has_residual: bool, seed: int = 0) -> tuple[Any, ...]:
    """Random x, w, norm weight and residual; a norm's weights are far from one, its rows of different sizes."""
    num_rows, in_channels, out_channels = sizes
    rng = np.random.default_rng(seed)
    outputs = out_channels * (2 if form.is_gated else 1)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    x_RD = normal(num_rows, in_channels) * jnp.asarray(2.0 ** rng.integers(-3, 4, (num_rows, 1)), jnp.bfloat16)
    w = normal(*((outputs, in_channels) if form.is_out_major else (in_channels, outputs)))
    norm_weight_D = None if form.norm_eps is None else normal(in_channels) * 2
    return x_RD, w, norm_weight_D, normal(num_rows, out_channels) if has_residual else None


def expected(form: Form, x_RD: Any, w: Any, norm_weight_D: Any, residual_RN: Any) -> np.ndarray:
    """The contract in float64."""
    x, w = np.asarray(x_RD, np.float64), np.asarray(w, np.float64)
    if form.norm_eps is not None:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + form.norm_eps) * np.asarray(norm_weight_D, np.float64)
    out = x @ (w.T if form.is_out_major else w)
    if form.is_gated:
        gate, up = np.split(out, 2, axis=1)
        out = gate * (1 + np.tanh(gate / 2)) / 2 * up  # the logistic function, which cannot overflow in this form
    return out if residual_RN is None else out + np.asarray(residual_RN, np.float64)


def check(run: Any, form: Form, sizes: tuple[int, int, int], *, has_residual: bool = False, seed: int = 0) -> None:
    """Each row against float64: within 2^-7 of its norm where rows were rounded on the way, 2^-8 of it elsewhere."""
    arrays = inputs(form, sizes, has_residual=has_residual, seed=seed)
    out_RN, expected_RN = np.asarray(run(form, *arrays), np.float64), expected(form, *arrays)
    assert out_RN.shape == expected_RN.shape
    limit_R = 2.0 ** (-8 if form.norm_eps is None else -7) * np.linalg.norm(expected_RN, axis=1)
    assert (np.linalg.norm(out_RN - expected_RN, axis=1) <= limit_R).all()


def kernel(tile: TileConfig) -> Any:
    """The kernel in the interpreter."""
    return functools.partial(linear_gpu, tile=tile, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("name", CASES)
def test_the_reference(name: str) -> None:
    form, sizes, has_residual, _ = CASES[name]
    check(linear_reference, form, sizes, has_residual=has_residual)


@needs_interpreter
@pytest.mark.parametrize("name", CASES)
def test_the_kernel(name: str) -> None:
    form, sizes, has_residual, tile = CASES[name]
    check(kernel(tile), form, sizes, has_residual=has_residual)


@needs_interpreter
@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_random_products(seed: int) -> None:
    rng = np.random.default_rng(seed)
    form = Form(None if rng.random() < 0.5 else 1e-5, rng.random() < 0.4, rng.random() < 0.3)
    split, in_block = int(rng.choice([1, 2, 4])), int(rng.choice([64, 128]))
    out_block = 128 if form.is_gated else int(rng.choice([64, 128]))
    in_channels = split * in_block * int(rng.integers(1, 4))
    out_channels = out_block * int(rng.integers(1, 5)) // (2 if form.is_gated else 1)
    tile = TileConfig(in_block, out_block, split, int(rng.integers(2, 5)), int(rng.integers(1, 4)), bool(seed % 2))
    sizes = (int(rng.integers(1, 34)), in_channels, out_channels)
    check(kernel(tile), form, sizes, has_residual=rng.random() < 0.5, seed=seed)


@needs_interpreter
def test_a_row_has_the_same_bits_whatever_the_others_are() -> None:
    form, tile = GATED, TileConfig(64, 128, 2, 2, 1)
    x_RD, w, norm_weight_D, residual_RN = inputs(form, (64, 256, 64), has_residual=True)
    outs = {
        num_rows: np.asarray(kernel(tile)(form, x_RD[:num_rows], w, norm_weight_D, residual_RN[:num_rows]), np.float32)
        for num_rows in (1, 8, 64)
    }
    np.testing.assert_array_equal(outs[8], outs[64][:8])
    np.testing.assert_array_equal(outs[1], outs[64][:1])


@needs_interpreter
def test_a_row_that_is_not_finite_stays_alone() -> None:
    form, tile = NORM, TileConfig(64, 64, 2, 2, 1)
    x_RD, *rest = inputs(form, (3, 128, 64), has_residual=False)
    out_RN = np.asarray(kernel(tile)(form, x_RD.at[1, 100].set(jnp.nan), *rest), np.float32)
    assert np.isnan(out_RN[1]).all()
    assert np.isfinite(out_RN[[0, 2]]).all()


@pytest.mark.parametrize(
    "shape", [*bench_linear.SHAPES.values(), bench_linear.Shape(576, 192, Form()), bench_linear.Shape(64, 64, Form())]
)
def test_the_cut_of_a_shape_fits_it_and_sums_in_one_order_for_all_numbers_of_rows(shape: bench_linear.Shape) -> None:
    tiles = [default_tile(shape.problem(num_rows)) for num_rows in (1, 8, 33, 64)]
    assert len({replace(tile, num_stages=1) for tile in tiles}) == 1
    assert all(tile.num_stages >= 3 for tile in tiles)
    assert shape.in_channels % (tiles[0].k_split * tiles[0].in_block) == 0
    outputs = shape.out_channels * (2 if shape.form.is_gated else 1)
    assert outputs % tiles[0].out_block == 0


@needs_lowering
@pytest.mark.parametrize("name", ["norm, two CTAs", "gated, norm, residual, two CTAs", "logits, two items"])
def test_lowers_for_cuda_to_the_kernel_and_no_product(name: str) -> None:
    form, sizes, has_residual, _ = CASES[name]
    x_RD, w, norm_weight_D, residual_RN = inputs(form, sizes, has_residual=has_residual)
    call = functools.partial(
        streamed_linear, form=form, backend="mosaic_gpu", norm_weight_D=norm_weight_D, residual_RN=residual_RN
    )
    text = jax.jit(call).trace(x_RD, w).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"(streamed_linear\w*?)_mosaic_gpu\b", text)) == {"streamed_linear"}
    assert "dot" not in text.replace("streamed_linear", "")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem(4, 128, 256, "float32", Form()), "weights are float32"),
        (Problem(4, 100, 256, "bfloat16", Form()), "100 channels in"),
        (Problem(4, 128, 96, "bfloat16", Form()), "96 out"),
        (Problem(65, 128, 128, "bfloat16", Form()), "there are 65 rows; it must be 1 to 64"),
        (Problem(4, 128, 128, "bfloat16", Form(out_dtype="float16")), "the result is float16"),
    ],
)
def test_says_what_it_cannot_do(problem: Problem, reason: str) -> None:
    if jax.__version_info__ < (0, 11):
        reason = "need 0.11 or newer"
    assert reason in (supports("mosaic_gpu", problem) or "")
    assert supports("xla", problem) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x_RD": jnp.zeros((2, 3))}, "they must be .rows, channels. and .channels, out."),
        ({"x_RD": jnp.zeros((0, 4))}, "at least one element"),
        ({"x_RD": jnp.zeros((2, 4), jnp.bfloat16)}, "one floating-point type"),
        ({"w": jnp.zeros((4, 5)), "form": Form(is_gated=True)}, "as many ups as gates"),
        ({"form": NORM}, "needs both its weight and form.norm_eps"),
        ({"norm_weight_D": jnp.ones(4)}, "needs both its weight and form.norm_eps"),
        ({"form": NORM, "norm_weight_D": jnp.ones(5)}, "norm_weight is float32.5.; it must be float32.4."),
        ({"residual_RN": jnp.ones((2, 4))}, "residual is float32.2, 4.; it must be float32.2, 6."),
        ({"backend": "cutlass"}, "'cutlass'; it must be one of 'xla', 'mosaic_gpu'"),
    ],
)
def test_arrays_that_do_not_fit(arguments: dict[str, Any], sentence: str) -> None:
    defaults: dict[str, Any] = {"x_RD": jnp.zeros((2, 4)), "w": jnp.zeros((4, 6)), "backend": "xla"}
    with pytest.raises(ValueError, match=sentence):
        streamed_linear(**(defaults | arguments))


def test_a_tile_that_does_not_fit_is_refused() -> None:
    arrays = inputs(Form(), (1, 192, 64), has_residual=False)
    with pytest.raises(ValueError, match="192 channels in cannot be cut into 1 x 128"):
        linear_gpu(Form(), *arrays, tile=TileConfig(in_block=128))
    with pytest.raises(ValueError, match="64 outputs cannot be cut into blocks of 128"):
        linear_gpu(Form(), *arrays, tile=TileConfig(in_block=64, out_block=128))


def test_the_reference_is_the_plain_product() -> None:
    x_RD, w, *_ = inputs(Form(), (3, 64, 64), has_residual=False)
    np.testing.assert_array_equal(
        streamed_linear(x_RD, w, backend="xla"), jnp.dot(x_RD, w, preferred_element_type=jnp.float32).astype("bfloat16")
    )


# --- faults that the tests above would find


class _NoWait:
    """Mosaic GPU in which nobody waits for rows and weights."""

    def __getattr__(self, name: str) -> object:
        return getattr(plgpu, name)

    def barrier_wait(self, barrier: Any) -> None:
        if getattr(barrier, "ref", barrier).dtype.num_arrivals == 1:
            plgpu.barrier_wait(barrier)


def _fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels_pallas.streamed_linear import mosaic_gpu_kernel

    cta = mosaic_gpu_kernel._Cta
    channels, part, outputs, finish, weigh = cta.channels, cta.part, cta.outputs, cta.finish, cta.weigh_rows
    faults: dict[str, tuple[str, Any]] = {
        "all CTAs take the first stretch": (
            "channels",
            lambda self, step: channels(self, step - self.rank * self.num_steps),
        ),
        "a part is read from its neighbour": (
            "part",
            lambda self, item, rank, half: part(
                self, item, rank * 1 if isinstance(rank, jax.Array) else rank - 1, half
            ),
        ),
        "gates for ups": ("outputs", lambda self, item, half=0: outputs(self, item, 0)),
        "only the first CTA's squares": (
            "combine",
            lambda self, item, sums, squares, combine=cta.combine: combine(
                self, item, sums, None if squares is None else jnp.where(self.rank == 0, squares, 0.0)
            ),
        ),
        "rows are not weighed": ("weigh_rows", lambda self, stage, squares: weigh(self, jnp.int32(0), squares)),
        "gates and ups change places": (
            "finish",
            lambda self, item, sums, squares: finish(self, item, sums[::-1], squares),
        ),
    }
    if name == "nobody waits for rows and weights":
        monkeypatch.setattr(mosaic_gpu_kernel, "plgpu", _NoWait())
    else:
        monkeypatch.setattr(cta, *faults[name])


_MORE_FAULTS = ("gates for ups", "rows are not weighed", "gates and ups change places")
FAULTS = [
    "all CTAs take the first stretch",
    "a part is read from its neighbour",
    "only the first CTA's squares",
    "nobody waits for rows and weights",
    *(pytest.param(name, marks=pytest.mark.long) for name in _MORE_FAULTS),
]


@needs_interpreter
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, interpreter_reset: None) -> None:
    _fault(name, monkeypatch)
    form, sizes, has_residual, tile = CASES["gated, norm, residual, two CTAs"]
    with pytest.raises((AssertionError, RuntimeError)):
        check(kernel(tile), form, sizes, has_residual=has_residual)


def test_rows_fill_groups_of_eight() -> None:
    assert [padded_rows(num_rows) for num_rows in (1, 8, 9, 64)] == [8, 8, 16, 64]


def test_the_benchmark_counts_a_steps_weights() -> None:
    num_bytes = {name: shape.problem(1).weight_bytes for name, shape in bench_linear.SHAPES.items()}
    layer = sum(num_bytes[name] for name in ("qkv", "wo", "gate_up", "down"))
    assert bench_linear.NUM_LAYERS * layer + num_bytes["head"] == 2_471_493_632
    assert {case.shape for case in bench_linear.LINEAR} == {*bench_linear.SHAPES, "step"}
