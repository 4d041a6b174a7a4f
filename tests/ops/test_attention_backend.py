"""The engine's attention call lowers to the backend that was named, and to no other."""

import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import mosaic_gpu
from mtp_jax.core.types import LayerKV
from mtp_jax.ops.attention import PagedAttend

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
IS_OLD = jax.__version_info__ < (0, 11)

MLA_KERNELS = ["paged_attention_mosaic_gpu", "paged_attention_mosaic_gpu_combine"]


def lowered(backend: str, num_rows: int, dtype: str) -> str:
    """A layer's attention of the bundled model's shape, lowered for CUDA."""
    pages = jnp.zeros((9, 16, 1, 192), dtype)

    def attend(q_BWHC: jax.Array, k_BWGC: jax.Array, base_len: jax.Array, table_BP: jax.Array) -> jax.Array:
        call = PagedAttend(
            page_table_BP=table_BP,
            base_len=base_len,
            live=base_len >= 0,
            may_write_BW=jnp.ones((2, num_rows), bool),
            backend=backend,
        )
        return call(LayerKV(pages, None), q_BWHC, k_BWGC, None, scale=0.1, v_channels=128)[0]

    arguments = (
        jnp.zeros((2, num_rows, 8, 192), dtype),
        jnp.zeros((2, num_rows, 1, 192), dtype),
        jnp.zeros(2, jnp.int32),
        jnp.zeros((2, 4), jnp.int32),
    )
    return jax.jit(attend).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(IS_OLD, reason=f"jax {jax.__version__} lowers no Mosaic GPU kernel of ours: it takes 0.11")
@pytest.mark.parametrize(
    ("backend", "num_rows", "dtype", "kernels"),
    [
        ("mosaic_gpu", 1, "bfloat16", MLA_KERNELS),
        ("mosaic_gpu", 4, "bfloat16", MLA_KERNELS),
        ("mosaic_gpu", 16, "bfloat16", MLA_KERNELS),
        ("mosaic_gpu", 4, "float32", ["paged_attention_mosaic_gpu_exact"]),
        ("reference", 4, "bfloat16", []),
    ],
    ids=["one row", "verify", "prompt chunk", "exact", "reference"],
)
def test_the_program_has_the_named_kernels(backend: str, num_rows: int, dtype: str, kernels: list[str]) -> None:
    text = lowered(backend, num_rows, dtype)
    assert sorted(set(re.findall(r"(paged_attention_mosaic\w*?)_mosaic_gpu\b", text))) == sorted(kernels)
    assert ("stablehlo.exponential" in text) == (backend == "reference")  # the softmax of the reference, and only there


def test_an_old_jax_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "_OLDEST_JAX", (99, 0))
    with pytest.raises(NotImplementedError, match=r"need 99\.0 or newer"):
        lowered("mosaic_gpu", 4, "bfloat16")
