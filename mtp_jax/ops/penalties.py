"""What the request and the text written so far do to a row's logits, before any filter: the row's drafts included.

vLLM's order is bad words, min_tokens, logit bias, penalties. Bans come last here: nothing finite changes a -inf.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.core.layout import NO_TOKEN
from mtp_jax.core.types import RowText, SamplingRows, TokenFacts, TokenLists
from mtp_jax.ops.branches import if_needed

_LARGEST = float(jnp.finfo(jnp.float32).max)
_NOTHING = -2
"""Where nothing is written yet: no token, and not the mark of an unused place of a bad word either."""


def token_facts(
    rows: SamplingRows, history_BS: Int[Array, "B S"], num_known: Int[Array, " B"], vocab_size: int
) -> TokenFacts:
    """What each slot's text and biases say of every token; once a launch, for drafts and verification alike.

    `history_BS[b, :num_known[b]]` is the text of slot b. Zeros, at no cost, when no slot edits logits.
    """
    num_slots, max_len = history_BS.shape
    tail_len = 0 if rows.lists is None else rows.lists.bad_words_BMO.shape[-1] - 1

    def none() -> TokenFacts:
        zeros_BV = jnp.zeros((num_slots, vocab_size), jnp.int32)
        return TokenFacts(zeros_BV, zeros_BV, zeros_BV.astype(jnp.float32), jnp.zeros((num_slots, tail_len), jnp.int32))

    def counted() -> TokenFacts:
        slot_B1 = jnp.arange(num_slots)[:, None]
        position_1S = jnp.arange(max_len, dtype=jnp.int32)[None, :]
        tokens_BS = jnp.where(position_1S < num_known[:, None], history_BS, vocab_size)
        is_written_BS = (position_1S >= rows.prompt_len_B[:, None]).astype(jnp.int32)
        counts_B2V = jnp.zeros((num_slots, 2, vocab_size), jnp.int32)
        counts_B2V = counts_B2V.at[slot_B1, is_written_BS, tokens_BS].add(1, mode="drop")
        bias_BV = jnp.zeros((num_slots, vocab_size), jnp.float32)
        if rows.lists is not None:
            entry_1A = jnp.arange(rows.lists.bias_ids_BA.shape[1], dtype=jnp.int32)[None, :]
            ids_BA = jnp.where(entry_1A < rows.num_biases_B[:, None], rows.lists.bias_ids_BA, vocab_size)
            bias_BV = bias_BV.at[slot_B1, ids_BA].set(rows.lists.biases_BA, mode="drop")
        position_BO = num_known[:, None] - tail_len + jnp.arange(tail_len, dtype=jnp.int32)[None, :]
        tail_BO = history_BS.at[slot_B1, position_BO].get(mode="clip")
        tail_BO = jnp.where(position_BO >= rows.prompt_len_B[:, None], tail_BO, _NOTHING)
        return TokenFacts(counts_B2V[:, 0], counts_B2V[:, 1], bias_BV, tail_BO)

    return if_needed(rows.edits, counted, none)


def edit_logits(logits_BWV: Float[Array, "B W V"], rows: SamplingRows, text: RowText) -> Float[Array, "B W V"]:
    """The logits that greedy decoding looks at; those of a slot that edits nothing are the model's own.

    What is banned is -inf, all else finite. Nothing is computed when no slot edits logits.
    """

    def edited() -> Array:
        penalised_BWV = _penalised(logits_BWV + text.facts.bias_BV[:, None, :], rows, text)
        # Two numbers in the range of float32 may have a product or a sum outside of it. A token that a drafter does
        # not know (-inf) becomes as unlikely as can be, so that something is left when all that it knows is banned.
        return _without_banned(jnp.clip(penalised_BWV, -_LARGEST, _LARGEST), rows, text)

    return if_needed(rows.edits, edited, lambda: logits_BWV)


def _penalised(logits_BWV: Array, rows: SamplingRows, text: RowText) -> Array:
    """Repetition looks at prompt and output, frequency and presence at the output alone."""
    num_written_BWV = _count_written(text)
    was_written_BWV = num_written_BWV > 0
    repetition_B11 = rows.repetition_penalty_B[:, None, None]
    # A reciprocal written out: left to the compiler, division could round differently in programs of different shape.
    factor_BWV = jnp.where(logits_BWV > 0, 1 / repetition_B11, repetition_B11)
    is_in_text_BWV = was_written_BWV | (text.facts.num_in_prompt_BV > 0)[:, None, :]
    logits_BWV = jnp.where(is_in_text_BWV, logits_BWV * factor_BWV, logits_BWV)
    logits_BWV = logits_BWV - rows.frequency_penalty_B[:, None, None] * num_written_BWV.astype(jnp.float32)
    return jnp.where(was_written_BWV, logits_BWV - rows.presence_penalty_B[:, None, None], logits_BWV)


def _count_written(text: RowText) -> Int[Array, "B W V"]:
    """How often the slot wrote each token before each row's: known ones, and the row's drafts."""
    num_written_BV = text.facts.num_written_BV
    ids_V = jnp.arange(num_written_BV.shape[1], dtype=jnp.int32)
    num_written_BWV = jnp.broadcast_to(num_written_BV[:, None, :], (*text.is_before_BWK.shape[:2], len(ids_V)))
    # Compared one draft at a time: it becomes one pass with the penalties, where a scatter would be passes of its own.
    for draft_B, is_before_BW in zip(text.drafts_BK.T, jnp.moveaxis(text.is_before_BWK, -1, 0), strict=True):
        is_draft_BV = ids_V[None, :] == draft_B[:, None]
        num_written_BWV += (is_draft_BV[:, None, :] & is_before_BW[:, :, None]).astype(jnp.int32)
    return num_written_BWV


def _without_banned(logits_BWV: Array, rows: SamplingRows, text: RowText) -> Array:
    num_drafts_BW = jnp.sum(text.is_before_BWK, axis=-1, dtype=jnp.int32)
    num_written_BW1 = ((text.num_known - rows.prompt_len_B)[:, None] + num_drafts_BW)[:, :, None]
    is_early_BW1 = num_written_BW1 < rows.min_tokens_B[:, None, None]
    banned_BWX = jnp.where(is_early_BW1, rows.stop_ids_BI[:, None, :], NO_TOKEN)
    if rows.lists is not None:
        ends_BWM = _ends_of_bad_words(rows, rows.lists, text, num_drafts_BW[:, :, None])
        banned_BWX = jnp.concatenate([banned_BWX, ends_BWM], axis=-1)
    ids_V1 = jnp.arange(logits_BWV.shape[-1], dtype=jnp.int32)[:, None]
    is_banned_BWV = jnp.any(banned_BWX[:, :, None, :] == ids_V1[None, None], axis=-1)
    return jnp.where(is_banned_BWV, -jnp.inf, logits_BWV)


def _ends_of_bad_words(
    rows: SamplingRows, lists: TokenLists, text: RowText, num_drafts_BW1: Int[Array, "B W 1"]
) -> Int[Array, "B W M"]:
    """The last token of each bad word whose other tokens are the last ones written; NO_TOKEN for the others."""
    num_words, longest = lists.bad_words_BMO.shape[1:]
    beginnings_B1MO, ends_B1M = lists.bad_words_BMO[:, None, :, :-1], lists.bad_words_BMO[:, None, :, -1]
    in_use_BM = jnp.arange(num_words, dtype=jnp.int32)[None, :] < rows.num_bad_words_B[:, None]
    # How far back each token stands, 0 being the last one: the row's drafts, then what was known.
    back_11O = jnp.arange(longest - 2, -1, -1, dtype=jnp.int32)[None, None, :]
    draft_back_BWK = num_drafts_BW1 - jnp.cumsum(text.is_before_BWK, axis=-1, dtype=jnp.int32)
    tail_back_BWO = back_11O + num_drafts_BW1
    written_BWX = jnp.concatenate(
        [
            jnp.broadcast_to(text.facts.tail_BO[:, None, :], tail_back_BWO.shape),
            jnp.broadcast_to(text.drafts_BK[:, None, :], draft_back_BWK.shape),
        ],
        axis=-1,
    )
    back_BWX = jnp.concatenate([tail_back_BWO, jnp.where(text.is_before_BWK, draft_back_BWK, longest)], axis=-1)
    is_here_BWOX = back_BWX[:, :, None, :] == back_11O[..., None]
    last_BWO = jnp.sum(jnp.where(is_here_BWOX, written_BWX[:, :, None, :], 0), axis=-1)
    is_right_BWMO = (beginnings_B1MO == last_BWO[:, :, None, :]) | (beginnings_B1MO == NO_TOKEN)
    return jnp.where(jnp.all(is_right_BWMO, axis=-1) & in_use_BM[:, None, :], ends_B1M, NO_TOKEN)
