"""The mesh seen from inside the step: which axes are mapped, and the named collectives over them.

This is the only file that calls `psum` and its kin. A model writes `parallel.sum_over_model(x)` where a row-parallel
product ends; with no mesh the same line is the identity, so one forward serves one device and many.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Parallel:
    """Mesh axes that are mapped (by `shard_map`) around the caller; `None` means the axis is not mapped.

    Heads, feed-forward and vocabulary are sharded over `model`; slots over `data`; experts over both.
    Inside the mapped function every array is the local shard, so sizes are read from the weights, not from the config.
    """

    data: str | None = None
    model: str | None = None

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes that experts are sharded over, outermost first."""
        return tuple(axis for axis in (self.data, self.model) if axis is not None)

    def sum_over_model(self, x: Array) -> Array:
        """Sum of partial results over the `model` axis: ends a row-parallel product."""
        return x if self.model is None else lax.psum(x, self.model)

    def vocab_offset(self, local_vocab: int) -> Int[Array, ""]:
        """Global id of this shard's first vocabulary entry."""
        shard = 0 if self.model is None else lax.axis_index(self.model)
        return jnp.int32(shard * local_vocab)

    def gather_vocab(self, logits_xV: Float[Array, "*x v"]) -> Float[Array, "*x V"]:
        """Whole-vocabulary logits from vocabulary shards."""
        if self.model is None:
            return logits_xV
        return lax.all_gather(logits_xV, self.model, axis=logits_xV.ndim - 1, tiled=True)

    def argmax_over_vocab(self, scores_xV: Float[Array, "*x v"]) -> Int[Array, "*x"]:
        """Global id of the largest score; ties go to the lowest id, across shards as within one.

        Shards exchange (value, id) pairs, not logits: two small reductions whatever the vocabulary.

        >>> Parallel().argmax_over_vocab(jnp.array([[1.0, 3.0, 3.0]])).tolist()
        [1]
        """
        local = jnp.argmax(scores_xV, axis=-1).astype(jnp.int32)
        if self.model is None:
            return local
        value = jnp.max(scores_xV, axis=-1)
        best = lax.pmax(value, self.model)
        global_id = local + self.vocab_offset(scores_xV.shape[-1])
        candidate = jnp.where(value == best, global_id, jnp.iinfo(jnp.int32).max)
        return lax.pmin(candidate, self.model)


def take_embedding(table_VD: Float[Array, "v D"], tokens: Int[Array, "*x"], parallel: Parallel) -> Float[Array, "*x D"]:
    """Rows of a vocabulary-sharded embedding table: each shard looks up its own ids, the sum joins them."""
    if parallel.model is None:
        return jnp.take(table_VD, tokens, axis=0, mode="clip")
    local = tokens - parallel.vocab_offset(table_VD.shape[0])
    is_mine = (local >= 0) & (local < table_VD.shape[0])
    rows = jnp.take(table_VD, jnp.where(is_mine, local, 0), axis=0, mode="clip")
    return parallel.sum_over_model(jnp.where(is_mine[..., None], rows, jnp.zeros((), rows.dtype)))


NO_PARALLEL = Parallel()
