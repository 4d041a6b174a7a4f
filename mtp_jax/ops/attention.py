"""The attention call with everything bound that a model must not know: pages, lengths, write rights, backend."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas.paged_attention import PagedAttentionConfig, paged_attention
from mtp_jax.core.types import LayerKV
from mtp_jax.ops.kv_cache import page_addresses, row_positions, widen, write_kv
from mtp_jax.ops.trees import row_bit

DEAD_SLOT = -1
"""A committed length that tells every backend to read nothing and return zeros."""


@dataclass(frozen=True)
class PagedAttend:
    """Writes the rows' keys and values to their pages, then attends; satisfies `models.api.Attend`.

    Row w of slot b is stored at position `base_len[b] + first_row + w`. Rows that may not write (`may_write` false) put
    their keys into the null page: such rows are padding, and no row that matters attends them. Pools may have more
    channels than the rows (`stored_specs`).
    Rows of a tree have ancestor bits, and may go on from `first_row` others of it that are in the pages already.
    """

    page_table_BP: Int[Array, "B P"]
    base_len: Int[Array, " B"]
    live: Bool[Array, " B"]
    may_write_BW: Bool[Array, "B W"]
    backend: str
    ancestor_bits_BW: UInt32[Array, "B W"] | None = None
    first_row: int = 0
    debug: bool = False

    def __call__(
        self,
        layer_kv: LayerKV,
        q_BWHC: Float[Array, "B W H C"],
        k_BWGC: Float[Array, "B W G C"],
        v_BWGE: Float[Array, "B W G E"] | None,
        *,
        scale: float,
        v_channels: int,
    ) -> tuple[Float[Array, "B W H E"], LayerKV]:
        positions_BW = row_positions(self.base_len + self.first_row, q_BWHC.shape[1])
        may_write_BW = self.may_write_BW & self.live[:, None]
        page_size = layer_kv.k_pages.shape[1]
        addresses = page_addresses(positions_BW, self.page_table_BP, may_write_BW, page_size)
        k_channels = layer_kv.k_pages.shape[3]
        k_BWGC, q_BWHC = widen(k_BWGC, k_channels), widen(q_BWHC, k_channels)
        out_channels = v_channels
        if v_BWGE is not None and layer_kv.v_pages is not None:
            out_channels = layer_kv.v_pages.shape[3]
            v_BWGE = widen(v_BWGE, out_channels)
        layer_kv = write_kv(layer_kv, k_BWGC, v_BWGE, addresses)
        # Backends know rows that begin at the base: those of earlier calls are there again, as queries of nobody.
        earlier = (self.first_row, 0)
        q_BXHC = jnp.pad(q_BWHC, ((0, 0), earlier, (0, 0), (0, 0)))
        config = PagedAttentionConfig(backend=self.backend, scale=scale, v_channels=out_channels, debug=self.debug)
        out_BXHE = paged_attention(
            q_BXHC.astype(layer_kv.k_pages.dtype),
            layer_kv.k_pages,
            layer_kv.v_pages,
            self.page_table_BP,
            jnp.where(self.live, self.base_len, DEAD_SLOT),
            self._all_ancestor_bits(),
            config=config,
        )
        return out_BXHE[:, self.first_row :, :, :v_channels].astype(q_BWHC.dtype), layer_kv

    def _all_ancestor_bits(self) -> UInt32[Array, "B X"] | None:
        """With those of earlier rows in front: each sees itself."""
        if self.ancestor_bits_BW is None or self.first_row == 0:
            return self.ancestor_bits_BW
        own_X = row_bit(jnp.arange(self.first_row))
        own_BX = jnp.broadcast_to(own_X, (self.ancestor_bits_BW.shape[0], self.first_row))
        return jnp.concatenate([own_BX, self.ancestor_bits_BW], axis=1)
