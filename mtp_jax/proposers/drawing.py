"""From a drafter's logits to its next draft: the one place where drafts are drawn."""

from typing import Literal, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.types import Drafts, RowText, SlotView
from mtp_jax.ops.branches import if_needed
from mtp_jax.ops.laws import draw, row_probs
from mtp_jax.ops.row_text import text_after
from mtp_jax.ops.sampling import (
    Stream,
    block_keys,
    choose_tokens,
    greedy_tokens,
    gumbel_noise,
    law_of_head,
)
from mtp_jax.ops.sharding import Parallel

DraftSampling = Literal["coupled", "greedy", "probabilistic"]


def draft_sampling_of(spec: SpeculativeConfig) -> DraftSampling:
    """How a configuration wants drafts drawn; it has checked the name itself.

    >>> draft_sampling_of(SpeculativeConfig(acceptance="rejection"))
    'probabilistic'
    """
    return cast("DraftSampling", spec.draft_sampling)


def with_next_draft(
    earlier: Drafts,
    logits_B1V: Float[Array, "B 1 V"],
    slots: SlotView,
    sampling: DraftSampling,
    parallel: Parallel,
    ids_N: Int[Array, " N"] | None = None,
) -> Drafts:
    """The chain of drafts with one more, for the position after the `earlier` ones.

    "coupled": drawn as the target would draw it, with the noise of that position; "greedy": the most likely token;
    "probabilistic": drawn with coins of its own, by a law (temperature, filters and all as the request's) that goes
    along in `Drafts.probs_BKV`. Logits of a mesh as those of `BoundModel.draft_unembed`; `ids_N` names their columns
    where a drafter has a vocabulary of its own. The noise is always that of the target's ids.

    >>> from mtp_jax.core.config import SamplingParams
    >>> from mtp_jax.ops.sharding import NO_PARALLEL
    >>> from mtp_jax.testing.rows import sampling_rows, slot_view
    >>> slots = slot_view(sampling_rows(SamplingParams(temperature=0)), vocab_size=4, draft_len=2)
    >>> drafts = Drafts(jnp.zeros((1, 0), jnp.int32))
    >>> for logits in ([0.0, 9.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0]):
    ...     drafts = with_next_draft(drafts, jnp.array([[logits]]), slots, "greedy", NO_PARALLEL)
    >>> drafts.tokens_BK.tolist()
    [[1, 0]]
    """
    num_earlier = earlier.tokens_BK.shape[1]
    text = text_after(slots, earlier.tokens_BK)
    probs_BKV = None
    if sampling == "greedy":
        draft_B1 = greedy_tokens(logits_B1V, parallel, ids_N)
    elif sampling == "coupled":
        noise_B1V = slots.noise_BWV[:, num_earlier : num_earlier + 1]
        draft_B1 = choose_tokens(logits_B1V, noise_B1V, slots.sampling, text, parallel, ids_N)
    else:
        draft_B1, probs_B1V = _drawn(logits_B1V, slots, text, num_earlier, parallel, ids_N)
        laws = [probs_B1V] if earlier.probs_BKV is None else [earlier.probs_BKV, probs_B1V]
        probs_BKV = jnp.concatenate(laws, axis=1)
    return Drafts(jnp.concatenate([earlier.tokens_BK, draft_B1], axis=1), probs_BKV)


def _drawn(
    logits_B1V: Array, slots: SlotView, text: RowText, num_earlier: int, parallel: Parallel, ids_N: Array | None
) -> tuple[Int[Array, "b 1"], Float[Array, "b 1 V"]]:
    """A token of each slot, and the probabilities it was drawn from; those of greedy slots are one-hot.

    The noise is of the block that the step drafts as well as of the position: what falls is drafted again with other
    noise, since a rule may have looked at it.
    """
    rows, vocab_size = slots.sampling, slots.noise_BWV.shape[-1]
    ids_V = jnp.arange(vocab_size, dtype=jnp.int32)

    def sampled() -> tuple[Array, Array]:
        probs_B1V = row_probs(law_of_head(logits_B1V, rows, text, vocab_size, parallel, ids_N), rows)
        position_B1 = (slots.committed_len + 1 + num_earlier)[:, None]
        keys_B2 = block_keys(rows.key_B2, slots.committed_len)
        return draw(probs_B1V, gumbel_noise(keys_B2, position_B1, Stream.DRAFT, ids_V)), probs_B1V

    def greedy() -> tuple[Array, Array]:
        draft_B1 = choose_tokens(logits_B1V, slots.noise_BWV[:, :1], rows, text, parallel, ids_N)
        return draft_B1, (draft_B1[..., None] == ids_V[None, None, :]).astype(jnp.float32)

    return if_needed(rows.needs.whole_logits, sampled, greedy)
