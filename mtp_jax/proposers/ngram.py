"""Prompt lookup: drafts copied from where the slot's own last tokens stood before (Saxena, 2023).

Runs on the device, on the slot's history: no model, no KV, no carry. Good where an answer repeats its prompt (code
edits, summaries, retrieval); proposes nothing where the last tokens are new.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.types import Drafts, SlotView
from mtp_jax.proposers.from_text import FromText
from mtp_jax.proposers.method import Method

_LONGEST_MATCH = 5
_LONGEST_UNROLLED = 8


@dataclass(frozen=True)
class PromptLookup:
    """Looks the last `max_match` tokens up, then fewer, down to `min_match`: see `look_up`."""

    min_match: int
    max_match: int

    def __call__(self, slots: SlotView, draft_len: int) -> Drafts:
        tokens_BK, match_len_B = look_up(
            slots.history_BS, slots.committed_len + 1, num_drafts=draft_len, max_match=self.max_match
        )
        never = slots.history_BS.shape[1] + 1  # and a length that an int32 holds
        is_found_B = slots.live & (match_len_B >= min(self.min_match, never))
        return Drafts(tokens_BK, num_proposed=jnp.where(is_found_B, draft_len, 0))


def look_up(
    history_BS: Int[Array, "B S"], num_known: Int[Array, " B"], *, num_drafts: int, max_match: int
) -> tuple[Int[Array, "B K"], Int[Array, " B"]]:
    """(drafts, match length) from the place in each slot's text that ends most like its end.

    Of all earlier positions the one before which the most tokens, up to `max_match`, equal the last ones; of equals the
    latest. The drafts are the tokens after it. A place so late that they run into the end of the text is one period of
    a repetition, and the drafts go on with it. Match length 0: the last token is new, and the drafts mean nothing.

    >>> text = jnp.array([[5, 6, 7, 9, 5, 6, 0, 0]])
    >>> drafts, match = look_up(text, jnp.array([6]), num_drafts=3, max_match=4)
    >>> drafts.tolist(), match.tolist()
    ([[7, 9, 5]], [2])
    """
    last_B = num_known - 1
    position_S = jnp.arange(history_BS.shape[1], dtype=jnp.int32)

    def compare(distance: Array | int, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        """Whether what stands `distance` places before each position is what stands so far before the text's end."""
        is_run_BS, match_len_BS = so_far
        shifted_BS = jnp.roll(history_BS, distance, axis=1)
        own_B1 = jnp.take_along_axis(history_BS, jnp.maximum(last_B - distance, 0)[:, None], axis=1)
        is_run_BS &= (position_S >= distance)[None, :] & (shifted_BS == own_B1)
        return is_run_BS, match_len_BS + is_run_BS.astype(jnp.int32)

    is_run_BS = (position_S[None, :] < last_B[:, None]) & (last_B[:, None] >= 0)
    num_compared = min(max_match, history_BS.shape[1])
    _, match_len_BS = lax.fori_loop(
        0,
        num_compared,
        compare,
        (is_run_BS, jnp.zeros(history_BS.shape, jnp.int32)),
        unroll=num_compared <= _LONGEST_UNROLLED,  # a user may name any length, and programs must stay small
    )
    match_len_B = jnp.max(match_len_BS, axis=1)
    is_best_BS = (match_len_BS == match_len_B[:, None]) & (match_len_BS > 0)
    place_B = jnp.max(jnp.where(is_best_BS, position_S[None, :], -1), axis=1)
    period_B1 = jnp.maximum(last_B - place_B, 1)[:, None]
    source_BK = place_B[:, None] + 1 + lax.rem(jnp.arange(num_drafts, dtype=jnp.int32)[None, :], period_B1)
    return jnp.take_along_axis(history_BS, source_BK, axis=1, mode="clip"), match_len_B


def match_lens(spec: SpeculativeConfig, *, shortest: int) -> tuple[int, int]:
    """(shortest, longest) match of prompt lookup; a bound left open makes room for the one that was given.

    >>> match_lens(SpeculativeConfig(method="ngram", prompt_lookup_min=7), shortest=2)
    (7, 7)
    """
    low, high = spec.prompt_lookup_min, spec.prompt_lookup_max
    if low is None:
        low = shortest if high is None else min(shortest, high)
    return low, max(_LONGEST_MATCH, low) if high is None else high


NGRAM = Method(
    lambda family, spec: FromText(PromptLookup(*match_lens(spec, shortest=2))),
    options=frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
)
