"""Attention over pools with more channels than the model has: the same numbers, and the channels added stay zero."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import BACKENDS
from mtp_jax.core.types import KVSpec, LayerKV
from mtp_jax.ops.attention import PagedAttend
from mtp_jax.ops.kv_cache import init_kv, stored_specs

LATENT = KVSpec(num_kv_heads=1, k_channels=6, v_channels=None, axis=None)
GROUPED = KVSpec(num_kv_heads=2, k_channels=6, v_channels=4, axis="kv_heads")


@pytest.mark.parametrize("spec", [LATENT, GROUPED], ids=["latent", "grouped"])
def test_more_channels_change_nothing(spec: KVSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "wide", replace(BACKENDS["reference"], channel_multiple=16))
    (narrow_BWHE, _), (wide_BWHE, wide_kv) = attend(spec, "reference"), attend(spec, "wide")
    assert wide_BWHE.shape == (2, 3, 4, 4)
    np.testing.assert_allclose(wide_BWHE, narrow_BWHE, rtol=1e-6)
    assert wide_kv.k_pages.shape[3] == 16
    assert np.asarray(wide_kv.k_pages[..., :6]).any()
    assert not np.asarray(wide_kv.k_pages[..., 6:]).any()
    if spec.v_channels is not None:
        assert wide_kv.v_pages is not None
        assert wide_kv.v_pages.shape[3] == 16
        assert not np.asarray(wide_kv.v_pages[..., 4:]).any()


def attend(spec: KVSpec, backend: str) -> tuple[jax.Array, LayerKV]:
    """Three rows of two slots, the second with a position before them."""
    (layer_kv,) = init_kv(stored_specs([spec], backend), num_pages=4, page_size=8, dtype=jnp.dtype("float32"))
    call = PagedAttend(
        page_table_BP=jnp.array([[1], [3]], jnp.int32),
        base_len=jnp.array([0, 1], jnp.int32),
        live=jnp.array([True, True]),
        may_write_BW=jnp.ones((2, 3), bool),
        backend=backend,
    )
    q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)

    def whole_numbers(key: jax.Array, *shape: int) -> jax.Array:
        """Their products add up exactly, in any order."""
        return jax.random.randint(key, (2, 3, *shape), -2, 3).astype(jnp.float32)

    q_BWHC = whole_numbers(q_key, 4, spec.k_channels)
    k_BWGC = whole_numbers(k_key, spec.num_kv_heads, spec.k_channels)
    v_BWGE = None if spec.v_channels is None else whole_numbers(v_key, spec.num_kv_heads, spec.v_channels)
    return call(layer_kv, q_BWHC, k_BWGC, v_BWGE, scale=0.5, v_channels=4)
