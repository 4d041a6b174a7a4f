"""Slots and their sampling as the steps see them, for tests of rules, proposers and sampling without an engine."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.types import RowText, SamplingRows, SlotView
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.sampling import target_noise


def sampling_rows(*params: SamplingParams, seeds: Sequence[int] = ()) -> SamplingRows:
    """One slot for each of `params`, as a launch would bring them; seeds 0, 1, 2, ... unless given.

    >>> sampling_rows(SamplingParams(temperature=0), SamplingParams(top_k=5)).top_k_B.tolist()
    [0, 5]
    """
    seeds = seeds or range(len(params))
    return SamplingRows(
        key_B2=jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32),
        temperature_B=jnp.array([one.temperature for one in params], jnp.float32),
        top_k_B=jnp.array([one.top_k for one in params], jnp.int32),
        top_p_B=jnp.array([one.top_p for one in params], jnp.float32),
        num_logprobs_B=jnp.array([-1 if one.logprobs is None else one.logprobs for one in params], jnp.int32),
    )


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
    ample = {
        "pending_token": zeros,
        "live": jnp.ones((num_slots,), bool),
        "draft_cap": zeros + draft_len,
        "num_positions": zeros + draft_len + 1,
        "limit": committed + 100,
        "page_table_BP": jnp.zeros((num_slots, 1), jnp.int32),
        "stop_ids_BI": jnp.zeros((num_slots, 0), jnp.int32),
        "history_BS": jnp.zeros((num_slots, 16), jnp.int32),
        "noise_BWV": target_noise(sampling, row_positions(committed + 1, draft_len + 1), vocab_size),
    }
    return SlotView(committed_len=committed, sampling=sampling, **(ample | fields))


def no_text(logits_BWV: Float[Array, "B W V"]) -> RowText:
    """Rows that speak after nothing at all, one for each row of the logits."""
    num_slots, num_rows = logits_BWV.shape[:2]
    nothing = jnp.zeros((num_slots, 1), jnp.int32)
    return RowText(nothing, nothing[:, 0], nothing[:, :0], jnp.zeros((num_slots, num_rows, 0), bool))
