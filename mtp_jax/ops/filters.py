"""Filters of sampled decoding: temperature, min-p, top-k, top-p; thresholds are searched for, nothing is sorted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from mtp_jax.core.types import SamplingRows


def filter_logits(logits_BWV: Float[Array, "B W V"], rows: SamplingRows) -> Float[Array, "B W V"]:
    """Logits after temperature, min-p, top-k, top-p, in this order (vLLM's); what is filtered out is -inf.

    min-p keeps what is at least that many times as likely as the most likely token. Entries equal to the last one kept
    are kept too. Greedy rows (temperature 0) pass unscaled. The largest logit is subtracted first, so that no
    temperature can overflow.

    >>> from mtp_jax.core.config import SamplingParams
    >>> from mtp_jax.testing.rows import sampling_rows
    >>> filter_logits(jnp.array([[[1.0, 3.0, 2.0]]]), sampling_rows(SamplingParams(top_k=2))).tolist()
    [[[-inf, 0.0, -1.0]]]
    """
    temperature = jnp.where(rows.temperature_B > 0, rows.temperature_B, 1.0)[:, None, None]
    scaled = (logits_BWV - jnp.max(logits_BWV, axis=-1, keepdims=True)) / temperature
    scaled = jnp.where(scaled >= jnp.log(rows.min_p_B)[:, None, None], scaled, -jnp.inf)
    wants_filter = (rows.temperature_B > 0) & ((rows.top_k_B > 0) | (rows.top_p_B < 1.0))
    return lax.cond(jnp.any(wants_filter), lambda: _filter(scaled, rows), lambda: scaled)


def _filter(scaled_BWV: Float[Array, "B W V"], rows: SamplingRows) -> Float[Array, "B W V"]:
    vocab_size = scaled_BWV.shape[-1]
    top_k = jnp.where(rows.top_k_B > 0, jnp.minimum(rows.top_k_B, vocab_size), vocab_size)[:, None]
    order_BWV = _ordered_bits(scaled_BWV)
    kth = _largest_threshold(order_BWV, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= top_k)
    in_top_k = order_BWV >= kth[..., None]
    probs_BWV = jax.nn.softmax(jnp.where(in_top_k, scaled_BWV, -jnp.inf), axis=-1)
    top_p = rows.top_p_B[:, None]
    edge = _largest_threshold(order_BWV, lambda kept: jnp.sum(jnp.where(kept, probs_BWV, 0.0), axis=-1) >= top_p)
    # Rounding may leave the total mass just under a top_p just under one: then no threshold is found and all stay.
    in_top_p = (order_BWV >= edge[..., None]) | (top_p >= 1.0)[..., None]
    return jnp.where(in_top_k & in_top_p, scaled_BWV, -jnp.inf)


def _ordered_bits(x: Float[Array, "*x"]) -> UInt32[Array, "*x"]:
    """Unsigned integers in the order of the floats: positives get the sign bit set, negatives are inverted."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _largest_threshold(
    order_BWV: UInt32[Array, "B W V"], is_enough: Callable[[Bool[Array, "B W V"]], Bool[Array, "B W"]]
) -> UInt32[Array, "B W"]:
    """Largest t for which keeping all entries >= t is enough; found bit by bit, without sorting the vocabulary."""

    def try_bit(i: Array, found_BW: Array) -> Array:
        candidate = found_BW | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(is_enough(order_BWV >= candidate[..., None]), candidate, found_BW)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(order_BWV.shape[:2], jnp.uint32))
