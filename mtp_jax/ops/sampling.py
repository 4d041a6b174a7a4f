"""From logits to tokens: the one function that plain decoding, verification and coupled drafting share.

A token is argmax(adjusted log-probabilities + g), where g is Gumbel noise of (request key, position, token id) and of
nothing else: not of the step, the slot, the draft length or the batch. So a request's tokens are the same however they
were drafted, and a drafter that adds the same g to its own log-probabilities agrees with the target as often as their
laws allow: P(equal) >= (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from collections.abc import Callable
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.core.types import Logprobs, RowText, SamplingRows
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel


class Stream(IntEnum):
    """Independent random streams of one request. TARGET is shared by coupled drafts; the others never mix with it."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def gumbel_noise(
    key_B2: UInt32[Array, "B 2"], positions_BW: Int[Array, "B W"], stream: Stream, token_ids_V: Int[Array, " V"]
) -> Float[Array, "B W V"]:
    """Gumbel(0, 1) noise of (request key, position, stream, global token id), whichever vocabulary shard asks.

    Two threefry blocks: the first folds (position, stream) into the request's key, the second takes the token id as
    its counter. 23 random bits give a uniform in (0, 1), both ends excluded.
    """
    shape_BW = positions_BW.shape
    high_BW, low_BW = threefry2x32_p.bind(
        jnp.broadcast_to(key_B2[:, :1], shape_BW),
        jnp.broadcast_to(key_B2[:, 1:], shape_BW),
        positions_BW.astype(jnp.uint32),
        jnp.full(shape_BW, stream, jnp.uint32),
    )
    shape_BWV = (*shape_BW, token_ids_V.shape[0])
    bits_BWV, _ = threefry2x32_p.bind(
        jnp.broadcast_to(high_BW[..., None], shape_BWV),
        jnp.broadcast_to(low_BW[..., None], shape_BWV),
        jnp.zeros(shape_BWV, jnp.uint32),
        jnp.broadcast_to(token_ids_V.astype(jnp.uint32), shape_BWV),
    )
    uniform_BWV = ((bits_BWV >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform_BWV))


def target_noise(rows: SamplingRows, positions_BW: Int[Array, "B W"], vocab_size: int) -> Float[Array, "B W V"]:
    """The noise of the TARGET stream at `positions_BW`, drawn once a step for drafts and verification alike.

    Zeros, at no cost, when every slot is greedy.
    """
    ids_V = jnp.arange(vocab_size, dtype=jnp.int32)
    return lax.cond(
        jnp.any(rows.temperature_B > 0),
        lambda: gumbel_noise(rows.key_B2, positions_BW, Stream.TARGET, ids_V),
        lambda: jnp.zeros((*positions_BW.shape, vocab_size), jnp.float32),
    )


def adjust_logits(logits_BWV: Float[Array, "B W V"], rows: SamplingRows) -> Float[Array, "B W V"]:
    """Logits after temperature, then top-k, then top-p (vLLM's order); what is filtered out is -inf.

    Entries equal to the last one kept are kept too. Greedy rows (temperature 0) pass unscaled. The largest logit is
    subtracted first, so that no temperature can overflow.
    """
    temperature = jnp.where(rows.temperature_B > 0, rows.temperature_B, 1.0)[:, None, None]
    scaled = (logits_BWV - jnp.max(logits_BWV, axis=-1, keepdims=True)) / temperature
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


def choose_tokens(
    logits_BWV: Float[Array, "B W v"],
    noise_BWV: Float[Array, "b W V"],
    rows: SamplingRows,
    text: RowText,  # noqa: ARG001  penalties will look at it
    parallel: Parallel = NO_PARALLEL,
) -> Int[Array, "b W"]:
    """The token of each row: argmax(adjusted logits + noise), with `target_noise` of the positions drawn for.

    `text`: what each row speaks after.

    On a mesh the logits are those of all data shards' slots over this device's part of the vocabulary; the tokens those
    of this data shard. Greedy rows take the argmax, ties to the lowest id, whatever else is in the batch.
    """

    def sampled() -> Array:
        whole_BWV = parallel.whole_logits(logits_BWV)
        is_sampled_B11 = rows.temperature_B[:, None, None] > 0
        scores_BWV = jnp.where(is_sampled_B11, adjust_logits(whole_BWV, rows) + noise_BWV, whole_BWV)
        return NO_PARALLEL.argmax_over_vocab(scores_BWV)

    return lax.cond(rows.needs.samples, sampled, lambda: greedy_tokens(logits_BWV, parallel))


def greedy_tokens(logits_BWV: Float[Array, "B W v"], parallel: Parallel = NO_PARALLEL) -> Int[Array, "b W"]:
    """The most likely token of each row of this data shard; logits as in `choose_tokens`."""
    return parallel.own_slots(parallel.argmax_over_vocab(logits_BWV))


def token_logprobs(
    logits_BWV: Float[Array, "B W v"],
    tokens_BW: Int[Array, "b W"],
    rows: SamplingRows,
    max_logprobs: int,
    parallel: Parallel = NO_PARALLEL,
) -> Logprobs:
    """Raw log-softmax (before temperature and filters) of the tokens and of the `max_logprobs` most likely ones.

    Computed only if a slot of the launch asks; all zeros otherwise. Logits as in `choose_tokens`.
    """

    def computed() -> Logprobs:
        whole_BWV = parallel.whole_logits(logits_BWV)
        logprobs_BWV = jax.nn.log_softmax(whole_BWV, axis=-1)
        chosen_BW = jnp.take_along_axis(logprobs_BWV, tokens_BW[..., None], axis=-1)[..., 0]
        num_listed = min(max_logprobs, whole_BWV.shape[-1])
        top_BWQ, top_ids_BWQ = lax.top_k(logprobs_BWV, num_listed)
        padding = ((0, 0), (0, 0), (0, max_logprobs - num_listed))
        rank_BW = jnp.sum(logprobs_BWV > chosen_BW[..., None], axis=-1, dtype=jnp.int32) + 1
        return Logprobs(
            chosen_BE=chosen_BW,
            top_ids_BEQ=jnp.pad(top_ids_BWQ, padding),
            top_BEQ=jnp.pad(top_BWQ, padding, constant_values=-jnp.inf),
            rank_BE=rank_BW,
        )

    def absent() -> Logprobs:
        shape = tokens_BW.shape
        return Logprobs(
            chosen_BE=jnp.zeros(shape, jnp.float32),
            top_ids_BEQ=jnp.zeros((*shape, max_logprobs), jnp.int32),
            top_BEQ=jnp.zeros((*shape, max_logprobs), jnp.float32),
            rank_BE=jnp.zeros(shape, jnp.int32),
        )

    return lax.cond(rows.needs.logprobs, computed, absent)
