"""What a step says: the target's view, a rule's verdict, and what of it the host will read.

Vocabulary and dimensions: `core.types`.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.layout import OutputColumn


@struct.dataclass
class Verified:
    """The target's view of pending + drafts: row w speaks of the token that follows it (in a chain at c + w + 1).

    Logits on a mesh: this device's part of the vocabulary, for the slots of all data shards (`Parallel.gather_slots`).
    """

    features_BWJ: Float[Array, "B W J"]  # what a drafter is fed of each row: see `BoundModel.target`
    logits_BWV: Float[Array, "B W V"]


@struct.dataclass
class Accepted:
    """A rule's verdict. `tokens_BE[b, :num_accepted[b] + 1]` are the accepted drafts and the token after them.

    `target_tokens_BW`: the target's own token in each row, as plain decoding would draw it; under `match` the tokens
    are these, and a rule that lets others stand says both.
    `path_BE[b, :num_accepted[b] + 1]`: the rows that these tokens follow, ascending, row 0 first. None: 0, 1, 2 ...
    """

    num_accepted: Int[Array, " B"]
    tokens_BE: Int[Array, "B E"]
    target_tokens_BW: Int[Array, "B W"]
    path_BE: Int[Array, "B E"] | None = None


@struct.dataclass
class Logprobs:
    """Raw log-softmax of the target at each emitted token, or prompt token; zeros unless a slot of the launch asked."""

    chosen_BE: Float[Array, "B E"]
    top_ids_BEQ: Int[Array, "B E Q"]
    top_BEQ: Float[Array, "B E Q"]
    rank_BE: Int[Array, "B E"]  # 1 for the most likely token


@struct.dataclass
class PackedOutputs:
    """`StepOutputs` as they travel, in columns.

    `OutputColumn`s, `VoteColumn`s where steps are voted on, E emitted tokens, K drafts, W target tokens, and of trees
    the drafts' K parents.
    """

    small_BX: Int[Array, "B X"]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None = None


@struct.dataclass
class StepOutputs:
    """What the host reads, one launch late. Own buffers, never aliases of donated state."""

    tokens_BE: Int[Array, "B E"]
    num_emitted: Int[Array, " B"]
    num_accepted: Int[Array, " B"]  # verified drafts among the emitted tokens
    num_drafted: Int[Array, " B"]  # drafts that could have been accepted: the slot's cap as the device knew it
    draft_depth: Int[Array, " B"]  # the longest path among them; of a chain their number
    committed_len: Int[Array, " B"]  # after the step
    finished: Bool[Array, " B"]
    drafts_BK: Int[Array, "B K"]
    target_tokens_BW: Int[Array, "B W"]
    logprobs: Logprobs | None  # None: the program is not for launches that ask
    parent_BK: Int[Array, "B K"] | None = None  # None: chains
    prompt_logprobs: Logprobs | None = None  # of a prefill: of the token after each of the chunk's

    def pack(self, agreed_V: Int[Array, " V"] | None = None) -> PackedOutputs:
        """The same, the small arrays side by side in one: every array costs a transfer of its own.

        What the group agreed on, if it votes, is repeated in every row.
        """
        columns = {
            OutputColumn.NUM_EMITTED: self.num_emitted,
            OutputColumn.NUM_ACCEPTED: self.num_accepted,
            OutputColumn.NUM_DRAFTED: self.num_drafted,
            OutputColumn.DRAFT_DEPTH: self.draft_depth,
            OutputColumn.COMMITTED_LEN: self.committed_len,
            OutputColumn.FINISHED: self.finished.astype(jnp.int32),
        }
        fixed = jnp.stack([columns[column] for column in OutputColumn], axis=1)
        agreed = [] if agreed_V is None else [jnp.broadcast_to(agreed_V, (fixed.shape[0], agreed_V.shape[0]))]
        parents = [] if self.parent_BK is None else [self.parent_BK]
        parts = [fixed, *agreed, self.tokens_BE, self.drafts_BK, self.target_tokens_BW, *parents]
        small_BX = jnp.concatenate(parts, axis=1)
        return PackedOutputs(small_BX, self.logprobs, self.prompt_logprobs)
