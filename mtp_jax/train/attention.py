"""Attention for training: dense, causal, over whole windows, handed to a family in place of the paged one.

The family's own forward code runs unchanged; only where keys come from differs.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KeyValue = tuple[Float[Array, "B S G C"], Float[Array, "B S G E"]]


@dataclass(frozen=True)
class DenseAttend:
    """Row q attends rows `first_row`..q of its own window. Satisfies `models.api.Attend`; takes and returns no KV.

    `first_row` 0 for the target. For MTP layer d > 0 of several it is d: its rows below d have no input.
    """

    first_row: int = 0

    def __call__(
        self,
        layer_kv: None,
        q_BWHC: Float[Array, "B S H C"],
        k_BWGC: Float[Array, "B S G C"],
        v_BWGE: Float[Array, "B S G E"] | None,
        *,
        scale: float,
        v_channels: int,
    ) -> tuple[Float[Array, "B S H E"], None]:
        key_value = (k_BWGC, k_BWGC[..., :v_channels] if v_BWGE is None else v_BWGE)
        return _attend(q_BWHC, key_value, (), scale, lag=0, first_row=self.first_row), layer_kv


@dataclass(frozen=True)
class RecursiveAttend:
    """Attention of one MTP layer applied again and again, as it is when serving. Satisfies `models.api.Attend`.

    `layer_kv` is the tuple of keys and values of the passes before; pass d is the d-th to be called. When a draft is
    made, the layer's cache holds rows computed from the target's own hidden states (pass 0) up to the last committed
    position, then one row of each recursion. So row q of pass d attends: pass 0 up to row q - d, row q - j of pass
    d - j for 0 < j < d, and itself.
    """

    def __call__(
        self,
        layer_kv: tuple[KeyValue, ...],
        q_BWHC: Float[Array, "B S H C"],
        k_BWGC: Float[Array, "B S G C"],
        v_BWGE: Float[Array, "B S G E"] | None,
        *,
        scale: float,
        v_channels: int,
    ) -> tuple[Float[Array, "B S H E"], tuple[KeyValue, ...]]:
        own = (k_BWGC, k_BWGC[..., :v_channels] if v_BWGE is None else v_BWGE)
        if not layer_kv:
            return _attend(q_BWHC, own, (), scale, lag=0, first_row=0), (own,)
        recent = [own]
        for back, (k, v) in enumerate(reversed(layer_kv[1:]), start=1):
            recent.append((jnp.roll(k, back, axis=1), jnp.roll(v, back, axis=1)))
        out = _attend(q_BWHC, layer_kv[0], tuple(recent), scale, lag=len(layer_kv), first_row=0)
        return out, (*layer_kv, own)


def _attend(
    q_BSHC: Float[Array, "B S H C"],
    whole: KeyValue,
    own_rows: tuple[KeyValue, ...],
    scale: float,
    lag: int,
    first_row: int,
) -> Float[Array, "B S H E"]:
    """Attention of each row q to rows `first_row`..q - `lag` of `whole` and to row q of each of `own_rows`."""
    k_BSGC, v_BSGE = whole
    batch, length, heads, channels = q_BSHC.shape
    groups = k_BSGC.shape[2]
    # Products keep the order (batch, group, query row, head, key row), so that none of them needs a transposition.
    q_BSGMC = (q_BSHC * jnp.asarray(scale, q_BSHC.dtype)).reshape(batch, length, groups, heads // groups, channels)
    q_BGSMC = jnp.swapaxes(q_BSGMC, 1, 2)
    rows_S = jnp.arange(length)
    visible_SS = (rows_S[None, :] <= rows_S[:, None] - lag) & (rows_S[None, :] >= first_row)
    # A row that sees nothing (q < first_row) would be 0/0; it sees itself, and its result is masked by the loss.
    if not own_rows:
        visible_SS = visible_SS | (rows_S[None, :] == rows_S[:, None])
    scores = jnp.einsum("bgsmc,btgc->bgsmt", q_BGSMC, k_BSGC, preferred_element_type=jnp.float32)
    scores = jnp.where(visible_SS[None, None, :, None, :], scores, -jnp.inf)
    extra = [jnp.einsum("bgsmc,bsgc->bgsm", q_BGSMC, k, preferred_element_type=jnp.float32) for k, _ in own_rows]
    largest = jax.lax.stop_gradient(jnp.max(jnp.stack([jnp.max(scores, axis=-1), *extra]), axis=0))
    weights = jnp.exp(scores - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum("bgsmt,btge->bgsme", weights.astype(v_BSGE.dtype), v_BSGE, preferred_element_type=jnp.float32)
    for score, (_, v) in zip(extra, own_rows, strict=True):
        weight = jnp.exp(score - largest)
        total = total + weight
        out = out + weight[..., None] * jnp.swapaxes(v, 1, 2)[:, :, :, None, :].astype(jnp.float32)
    out = jnp.swapaxes(out / total[..., None], 1, 2)
    return out.reshape(batch, length, heads, v_BSGE.shape[-1]).astype(q_BSHC.dtype)
