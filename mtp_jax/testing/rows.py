"""Slots and their sampling as the steps see them, for tests of rules, proposers and sampling without an engine."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.layout import NO_TOKEN
from mtp_jax.core.types import RowText, SamplingRows, SlotView, TokenFacts, TokenLists
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.penalties import token_facts
from mtp_jax.ops.sampling import target_noise


def sampling_rows(*params: SamplingParams, seeds: Sequence[int] = (), prompt_lens: Sequence[int] = ()) -> SamplingRows:
    """One slot for each of `params`, as a launch would bring them; seeds 0, 1, 2, ... and no prompt unless given.

    >>> sampling_rows(SamplingParams(temperature=0), SamplingParams(top_k=5)).top_k_B.tolist()
    [0, 5]
    """
    seeds = seeds or range(len(params))
    return SamplingRows(
        key_B2=jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32),
        temperature_B=jnp.array([one.temperature for one in params], jnp.float32),
        top_k_B=jnp.array([one.top_k for one in params], jnp.int32),
        top_p_B=jnp.array([one.top_p for one in params], jnp.float32),
        min_p_B=jnp.array([one.min_p for one in params], jnp.float32),
        num_logprobs_B=jnp.array([-1 if one.logprobs is None else one.logprobs for one in params], jnp.int32),
        prompt_len_B=jnp.array(prompt_lens or [0] * len(params), jnp.int32),
        min_tokens_B=jnp.array([one.min_tokens for one in params], jnp.int32),
        num_stop_ids_B=jnp.array([len(one.stop_token_ids or ()) for one in params], jnp.int32),
        presence_penalty_B=jnp.array([one.presence_penalty for one in params], jnp.float32),
        frequency_penalty_B=jnp.array([one.frequency_penalty for one in params], jnp.float32),
        repetition_penalty_B=jnp.array([one.repetition_penalty for one in params], jnp.float32),
        num_biases_B=jnp.array([len(one.logit_bias or ()) for one in params], jnp.int32),
        num_bad_words_B=jnp.array([len(one.bad_words or ()) for one in params], jnp.int32),
        thinking_ids_B2=jnp.array([one.thinking_token_ids or (NO_TOKEN, NO_TOKEN) for one in params], jnp.int32),
        stop_ids_BI=jnp.array(_padded([one.stop_token_ids or () for one in params])),
        lists=_lists(params),
    )


def _lists(params: Sequence[SamplingParams]) -> TokenLists | None:
    if not any(one.logit_bias or one.bad_words for one in params):
        return None
    words = [one.bad_words or () for one in params]
    longest = max((len(word) for of_slot in words for word in of_slot), default=1)
    words_BMO = np.full((len(params), max(map(len, words)), longest), NO_TOKEN, np.int32)
    for words_MO, of_slot in zip(words_BMO, words, strict=True):
        for word_O, word in zip(words_MO, of_slot, strict=False):
            word_O[longest - len(word) :] = word
    biases = [one.logit_bias or {} for one in params]
    return TokenLists(
        bias_ids_BA=jnp.array(_padded([tuple(bias) for bias in biases])),
        biases_BA=jnp.array(_padded([tuple(bias.values()) for bias in biases], np.float32)),
        bad_words_BMO=jnp.array(words_BMO),
    )


def _padded(lists: Sequence[Sequence[float]], dtype: type = np.int32) -> np.ndarray:
    padded_BX = np.full((len(lists), max(map(len, lists))), NO_TOKEN, dtype)
    for row_X, values in zip(padded_BX, lists, strict=True):
        row_X[: len(values)] = values
    return padded_BX


def slot_view(
    sampling: SamplingRows,
    *,
    vocab_size: int,
    draft_len: int,
    committed_len: Sequence[int] | Int[Array, " B"] = (),
    **fields: Any,
) -> SlotView:
    """Live slots with room for `draft_len` drafts each; `fields` replaces any other field.

    By default nothing is committed, the pending token is 0, and the noise is that of the positions to come.
    """
    num_slots = len(sampling.temperature_B)
    zeros = jnp.zeros((num_slots,), jnp.int32)
    committed = jnp.asarray(committed_len, jnp.int32) if len(committed_len) else zeros
    ample: dict[str, Any] = {
        "pending_token": zeros,
        "live": jnp.ones((num_slots,), bool),
        "draft_cap": zeros + draft_len,
        "num_positions": zeros + draft_len + 1,
        "limit": committed + 100,
        "page_table_BP": jnp.zeros((num_slots, 1), jnp.int32),
        "history_BS": jnp.zeros((num_slots, 16), jnp.int32),
        "noise_BWV": target_noise(sampling, row_positions(committed + 1, draft_len + 1), vocab_size),
    } | fields
    ample.setdefault("facts", token_facts(sampling, ample["history_BS"], committed + 1, vocab_size))
    return SlotView(committed_len=committed, sampling=sampling, **ample)


def no_text(logits_BWV: Float[Array, "B W V"]) -> RowText:
    """Rows that speak after nothing at all, one for each row of the logits."""
    num_slots, num_rows, vocab_size = logits_BWV.shape
    nothing = jnp.zeros((num_slots, 1), jnp.int32)
    nothing_BV = jnp.zeros((num_slots, vocab_size), jnp.int32)
    facts = TokenFacts(nothing_BV, nothing_BV, nothing_BV.astype(jnp.float32), nothing[:, :0])
    return RowText(nothing, nothing[:, 0], nothing[:, :0], jnp.zeros((num_slots, num_rows, 0), bool), facts)
