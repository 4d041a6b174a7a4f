"""From logits to tokens: the one function that plain decoding, verification and coupled drafting share.

A token is argmax(adjusted log-probabilities + g), where g is Gumbel noise of (request key, position, token id) and of
nothing else: not of the step, the slot, the draft length or the batch. So a request's tokens are the same however they
were drafted, and a drafter that adds the same g to its own log-probabilities agrees with the target as often as their
laws allow: P(equal) >= (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from enum import IntEnum, unique

import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.core.types import RowText, SamplingRows
from mtp_jax.ops.branches import if_needed
from mtp_jax.ops.filters import filter_logits
from mtp_jax.ops.penalties import edit_logits
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from mtp_jax.ops.trees import depths


@unique
class Stream(IntEnum):
    """Independent random streams of one request. TARGET is shared by coupled drafts; the others never mix with it.

    BLOCK draws nothing: it makes the key of one block of drafts, see `block_keys`.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BLOCK = 4


def gumbel_noise(
    key_B2: UInt32[Array, "B 2"], positions_BW: Int[Array, "B W"], stream: Stream, token_ids_V: Int[Array, " V"]
) -> Float[Array, "B W V"]:
    """Gumbel(0, 1) noise of (request key, position, stream, global token id), whichever vocabulary shard asks.

    Two threefry blocks: the first folds (position, stream) into the request's key, the second takes the token id as
    its counter. 23 random bits give a uniform in (0, 1), both ends excluded.
    """
    high_BW, low_BW = _fold(key_B2, positions_BW, stream)
    shape_BWV = (*positions_BW.shape, token_ids_V.shape[0])
    bits_BWV, _ = threefry2x32_p.bind(
        jnp.broadcast_to(high_BW[..., None], shape_BWV),
        jnp.broadcast_to(low_BW[..., None], shape_BWV),
        jnp.zeros(shape_BWV, jnp.uint32),
        jnp.broadcast_to(token_ids_V.astype(jnp.uint32), shape_BWV),
    )
    return -jnp.log(-jnp.log(_uniform(bits_BWV)))


def uniform_coins(key_B2: UInt32[Array, "B 2"], positions_BW: Int[Array, "B W"], stream: Stream) -> Float[Array, "B W"]:
    """One uniform number in (0, 1) of (request key, position, stream).

    A stream gives these or Gumbel noise, never both.
    """
    bits_BW, _ = _fold(key_B2, positions_BW, stream)
    return _uniform(bits_BW)


def block_keys(key_B2: UInt32[Array, "B 2"], committed_len_B: Int[Array, " B"]) -> UInt32[Array, "B 2"]:
    """Keys of the block of drafts that begins at each slot's committed_len, no two blocks of a request alike.

    For what is looked at beyond the tokens that a step emits: the same position is drafted again in the next step, and
    must not meet what the last verdict depended on.
    """
    high_B1, low_B1 = _fold(key_B2, committed_len_B[:, None], Stream.BLOCK)
    return jnp.concatenate([high_B1, low_B1], axis=1)


def _fold(key_B2: Array, positions_BW: Array, stream: Stream) -> tuple[Array, Array]:
    shape_BW = positions_BW.shape
    high_BW, low_BW = threefry2x32_p.bind(
        jnp.broadcast_to(key_B2[:, :1], shape_BW),
        jnp.broadcast_to(key_B2[:, 1:], shape_BW),
        positions_BW.astype(jnp.uint32),
        jnp.full(shape_BW, stream, jnp.uint32),
    )
    return high_BW, low_BW


def _uniform(bits: UInt32[Array, "*x"]) -> Float[Array, "*x"]:
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)


def target_noise(rows: SamplingRows, positions_BW: Int[Array, "B W"], vocab_size: int) -> Float[Array, "B W V"]:
    """The noise of the TARGET stream at `positions_BW`, drawn once a step for drafts and verification alike.

    Zeros, at no cost, when every slot is greedy.
    """
    ids_V = jnp.arange(vocab_size, dtype=jnp.int32)
    return if_needed(
        rows.draws,
        lambda: gumbel_noise(rows.key_B2, positions_BW, Stream.TARGET, ids_V),
        lambda: jnp.zeros((*positions_BW.shape, vocab_size), jnp.float32),
    )


def noise_of_rows(
    rows: SamplingRows, noise_BEV: Float[Array, "B E V"], bits_BW: UInt32[Array, "B W"]
) -> Float[Array, "B W V"]:
    """For the rows of a tree, from the noise of their positions: siblings compete for one position and share it."""
    shape_BWV = (*bits_BW.shape, noise_BEV.shape[-1])
    return if_needed(
        rows.draws,
        lambda: jnp.take_along_axis(noise_BEV, depths(bits_BW)[..., None], axis=1),
        lambda: jnp.zeros(shape_BWV, noise_BEV.dtype),
    )


def law_logits(
    whole_BWV: Float[Array, "B W V"],
    rows: SamplingRows,
    text: RowText,
) -> Float[Array, "B W V"]:
    """The law of each row's token, as logits: what the request asked for, applied to the target's whole raw logits.

    A sampled row's token follows their softmax (-inf: banned or filtered out); a greedy row's is their argmax, and they
    are not scaled then. No collectives: on a mesh these are a data shard's own slots with the whole vocabulary.
    """
    edited_BWV = edit_logits(whole_BWV, rows, text)
    is_sampled_B11 = rows.temperature_B[:, None, None] > 0
    return jnp.where(is_sampled_B11, filter_logits(edited_BWV, rows), edited_BWV)


def law_of_head(
    logits_BWV: Float[Array, "B W v"],
    rows: SamplingRows,
    text: RowText,
    vocab_size: int,
    parallel: Parallel = NO_PARALLEL,
    ids_N: Int[Array, " N"] | None = None,
) -> Float[Array, "b W V"]:
    """`law_logits` of what a head says, whole: over all of the mesh's parts, and over the target's `vocab_size` tokens.

    Logits and `ids_N` as in `choose_tokens`; what a drafter's own vocabulary lacks has no probability. Has collectives:
    every device must come here, or none.
    """
    whole_BWV = parallel.whole_logits(logits_BWV)
    if ids_N is not None:
        whole_BWV = over_target_vocab(whole_BWV, ids_N, vocab_size)
    return law_logits(whole_BWV, rows, text)


def choose_tokens(
    logits_BWV: Float[Array, "B W v"],
    noise_BWV: Float[Array, "b W V"],
    rows: SamplingRows,
    text: RowText,
    parallel: Parallel = NO_PARALLEL,
    ids_N: Int[Array, " N"] | None = None,
) -> Int[Array, "b W"]:
    """The token of each row: argmax(`law_logits` + noise), with `target_noise` of the positions drawn for.

    `text`: what each row speaks after. `ids_N`: the token of each column, where the logits are those of a drafter with
    a vocabulary of its own; the tokens returned are always the target's.

    On a mesh the logits are those of all data shards' slots over this device's part of the vocabulary; the tokens those
    of this data shard. Greedy rows take the argmax of their law, ties to the lowest id, whatever else is in the batch.
    """

    def chosen() -> Array:
        law_BWV = law_of_head(logits_BWV, rows, text, noise_BWV.shape[-1], parallel, ids_N)
        return tokens_of_law(law_BWV, noise_BWV, rows)

    return if_needed(rows.needs.whole_logits, chosen, lambda: greedy_tokens(logits_BWV, parallel, ids_N))


def tokens_of_law(
    law_BWV: Float[Array, "B W V"], noise_BWV: Float[Array, "B W V"], rows: SamplingRows
) -> Int[Array, "B W"]:
    """The tokens that `law_logits` give with this noise; greedy rows take no noise."""
    is_sampled_B11 = rows.temperature_B[:, None, None] > 0
    return NO_PARALLEL.argmax_over_vocab(jnp.where(is_sampled_B11, law_BWV + noise_BWV, law_BWV))


def greedy_tokens(
    logits_BWV: Float[Array, "B W v"], parallel: Parallel = NO_PARALLEL, ids_N: Int[Array, " N"] | None = None
) -> Int[Array, "b W"]:
    """The most likely token of each row of this data shard; logits and `ids_N` as in `choose_tokens`."""
    columns_BW = parallel.own_slots(parallel.argmax_over_vocab(logits_BWV))
    return columns_BW if ids_N is None else ids_N[columns_BW]


def over_target_vocab(
    logits_BWN: Float[Array, "B W N"], ids_N: Int[Array, " N"], vocab_size: int
) -> Float[Array, "B W V"]:
    """Logits of a drafter's own vocabulary in the target's columns: -inf, so of no probability, everywhere else.

    >>> over_target_vocab(jnp.array([[[1.0, 2.0]]]), jnp.array([3, 0]), 4).tolist()
    [[[2.0, -inf, -inf, 1.0]]]
    """
    nothing = jnp.full((*logits_BWN.shape[:2], vocab_size), -jnp.inf, logits_BWN.dtype)
    return nothing.at[:, :, ids_N].set(logits_BWN, mode="promise_in_bounds", unique_indices=True)
