"""Products by a named kernel: the same hidden states and logits, the kernel and nothing else where rows are few."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.streamed_linear import BACKENDS, PLAIN, Backend, Form, Problem, supports
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.linear import MAX_STREAMED_ROWS
from mtp_jax.models.registry import family_from_config
from tests.models.shapes import config_of


def attend(
    layer_kv: Any, q_BWHC: jax.Array, k_BWGC: jax.Array, v_BWGE: jax.Array | None, *, scale: float, v_channels: int
) -> tuple[jax.Array, Any]:
    """Not attention, but a function of all three that depends on every head."""
    if v_BWGE is None:  # latent: values are the first of a key's channels
        return q_BWHC[..., :v_channels] * scale + k_BWGC[..., :v_channels], layer_kv
    return q_BWHC * scale + jnp.repeat(k_BWGC + v_BWGE, q_BWHC.shape[2] // k_BWGC.shape[2], axis=2), layer_kv


def run(family: MtpDecoder, weights: Any, num_slots: int = 2, num_rows: int = 3) -> list[jax.Array]:
    """Hidden states and logits, and those of the MTP layer if there is one."""
    tokens_BW = jnp.arange(num_slots * num_rows).reshape(num_slots, num_rows) % family.vocab_size
    positions_BW = jnp.broadcast_to(jnp.arange(num_rows), tokens_BW.shape)
    hidden_BWD, _ = family.forward(weights, tokens_BW, positions_BW, (None,) * family.num_layers, attend)
    states = [hidden_BWD, family.unembed(weights, hidden_BWD)]
    if family.num_mtp_layers:
        states += family.draft_forward(weights, 0, tokens_BW, hidden_BWD, positions_BW, None, attend)[:2]
    return states


def streamed(architecture: str, **fields: Any) -> tuple[MtpDecoder, MtpDecoder]:
    """A family with XLA's products, and the same with the kernel's."""
    family = family_from_config(config_of(architecture, **fields))
    assert isinstance(family, MtpDecoder)
    return family, replace(family, linear_backend="mosaic_gpu")


def largest_error(plain: MtpDecoder, other: MtpDecoder) -> float:
    """Of hidden states and logits, over their norms."""
    weights = plain.init_weights(jax.random.key(0), jnp.bfloat16)
    errors = []
    outputs = [jax.jit(run, static_argnums=0)(family, weights) for family in (other, plain)]
    for got, expected in zip(*outputs, strict=True):
        assert got.dtype == expected.dtype
        good = np.asarray(expected, np.float64)
        errors.append(float(np.linalg.norm(np.asarray(got, np.float64) - good) / np.linalg.norm(good)))
    return max(errors)


def stand_in(monkeypatch: pytest.MonkeyPatch, **edits: Any) -> list[Form]:
    """Plain products in the kernel's place, whose arithmetic is its own tests' matter; the calls that come."""
    calls: list[Form] = []

    def linear(form: Form, x: Any, w: Any, norm: Any, residual: Any) -> jax.Array:
        calls.append(form)
        if "residual" in edits:
            residual = None
        elif form.is_gated and "gates" in edits:
            w = jnp.roll(w, w.shape[1] // 2, axis=1)
        return BACKENDS["xla"].run(form, x, w, norm, residual)

    monkeypatch.setitem(BACKENDS, "mosaic_gpu", Backend(linear, BACKENDS["xla"].supports))
    return calls


@pytest.mark.parametrize("architecture", ["llama", "glm4_moe", "deepseek_v3"])
def test_streamed_layers_give_what_plain_ones_do(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    assert largest_error(*streamed(architecture, num_hidden_layers=2)) <= 0.02
    assert any(form.is_gated for form in calls)
    assert any(form.is_out_major for form in calls)


@pytest.mark.parametrize("fault", ["residual", "gates"])
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, **{fault: True})
    assert largest_error(*streamed("llama", num_hidden_layers=1)) > 0.02


@pytest.mark.skipif(
    supports("mosaic_gpu", Problem(1, 64, 64, "bfloat16", PLAIN)) is not None,
    reason=f"jax {jax.__version__} has no Hopper kernels of ours",
)
def test_few_rows_have_the_kernel_for_every_product_and_a_chunk_has_xlas() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "vocab_size": 128, "intermediate_size": 64}
    _, family = streamed("llama", **sizes)
    weights = jax.eval_shape(lambda: family.init_weights(jax.random.key(0), jnp.bfloat16))
    num_products = 4 * (family.num_layers + family.num_mtp_layers) + family.num_mtp_layers + 1

    def products(num_slots: int, num_rows: int) -> tuple[int, int]:
        call = functools.partial(run, family, num_slots=num_slots, num_rows=num_rows)
        text = jax.jit(call).trace(weights).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"call @_run", text)), len(re.findall(r"stablehlo.dot_general", text))

    assert products(2, MAX_STREAMED_ROWS // 2) == (num_products, 0)
    assert products(1, MAX_STREAMED_ROWS + 1) == (0, num_products)
