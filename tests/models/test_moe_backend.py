"""Experts' products by a named kernel: the same sums, the kernel and nothing else, and refusals by name."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import BACKENDS, Backend, mosaic_gpu, supports
from kernels_pallas.grouped_matmul.contract import Problem
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.experts import expert_products, through_all
from mtp_jax.models.moe_backend import with_moe_backend
from mtp_jax.models.registry import family_from_config
from mtp_jax.testing.toy_family import ToyFamily
from tests.models.shapes import config_of

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
if supports("mosaic_gpu", Problem(1, 1, 64, 128, "bfloat16")) is not None or not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(f"jax {jax.__version__} has no Hopper kernels to interpret", allow_module_level=True)

D, F, X, K, T = 128, 64, 5, 2, 9


def inputs() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    return (
        jax.random.normal(keys[0], (T, D), jnp.bfloat16),
        jnp.argsort(jax.random.uniform(keys[1], (T, X)), axis=1)[:, :K],
        jax.random.uniform(keys[2], (T, K)),
        jax.random.normal(keys[3], (X, D, 2, F), jnp.bfloat16) / 11,
        jax.random.normal(keys[4], (X, F, D), jnp.bfloat16) / 8,
    )


def test_the_kernel_gives_the_sums_of_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(mosaic_gpu.grouped_matmul_gpu, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setitem(BACKENDS, "mosaic_gpu", Backend(run, mosaic_gpu.supports))
    x, ids, weights, gate_up, down = inputs()
    for offset, shard in ((0, slice(None)), (2, slice(2, 4))):  # all experts, and those of one shard
        local = (x, ids - offset, weights, gate_up[shard], down[shard])
        out = np.asarray(expert_products(*local, backend="mosaic_gpu"), np.float32)
        expected = np.asarray(through_all(*local), np.float32)
        assert np.abs(out - expected).max() <= 0.02 * np.abs(expected).max()


def test_both_products_are_the_kernel_and_none_is_xlas() -> None:
    products = jax.jit(functools.partial(expert_products, backend="mosaic_gpu"))
    text = products.trace(*inputs()).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu_v2", text)) == 2
    assert "ragged_dot" not in text
    assert "stablehlo.dot_general" not in text


FAMILY = family_from_config(config_of("deepseek_v3", hidden_size=128, moe_intermediate_size=64))


def test_the_backend_reaches_the_layers() -> None:
    family = with_moe_backend(FAMILY, "mosaic_gpu", jnp.dtype("bfloat16"))
    assert isinstance(family, MtpDecoder)
    assert family.moe is not None
    assert family.moe.backend == "mosaic_gpu"
    assert with_moe_backend(FAMILY, "reference", jnp.dtype("float32")) is FAMILY


@pytest.mark.parametrize(
    ("family", "backend", "dtype", "reason"),
    [
        (FAMILY, "fastest", "bfloat16", "moe_backend is 'fastest'; it must be one of 'reference', 'mosaic_gpu'"),
        (FAMILY, "mosaic_gpu", "float32", "weights are float32"),
        (ToyFamily(), "mosaic_gpu", "bfloat16", "this model has no experts"),
    ],
)
def test_what_cannot_be_done_is_refused(family: ModelFamily, backend: str, dtype: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_moe_backend(family, backend, jnp.dtype(dtype))
