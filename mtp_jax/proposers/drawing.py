"""From a drafter's logits to its next draft: the one place where drafts are drawn."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.core.types import Drafts, SlotView
from mtp_jax.ops.row_text import text_after
from mtp_jax.ops.sampling import choose_tokens, greedy_tokens
from mtp_jax.ops.sharding import Parallel

DraftSampling = Literal["coupled", "greedy"]


def with_next_draft(
    earlier: Drafts,
    logits_B1V: Float[Array, "B 1 V"],
    slots: SlotView,
    sampling: DraftSampling,
    parallel: Parallel,
    ids_N: Int[Array, " N"] | None = None,
) -> Drafts:
    """The chain of drafts with one more, for the position after the `earlier` ones.

    "coupled": drawn as the target would draw it, with the noise of that position; "greedy": the most likely token.
    Logits of a mesh as those of `BoundModel.draft_unembed`; `ids_N` names their columns where a drafter has a
    vocabulary of its own. The noise is always that of the target's ids.
    """
    num_earlier = earlier.tokens_BK.shape[1]
    if sampling == "greedy":
        draft_B1 = greedy_tokens(logits_B1V, parallel, ids_N)
    else:
        noise_B1V = slots.noise_BWV[:, num_earlier : num_earlier + 1]
        text = text_after(slots, earlier.tokens_BK)
        draft_B1 = choose_tokens(logits_B1V, noise_B1V, slots.sampling, text, parallel, ids_N)
    return Drafts(tokens_BK=jnp.concatenate([earlier.tokens_BK, draft_B1], axis=1))
