"""Every pytree of the engine (what a step says: `core.outputs`), and the vocabulary they are written in.

Vocabulary
----------
slot           one of B persistent rows of the device state
page           fixed run of Z KV positions; page 0 is the null page, where masked writes go
committed_len  c: positions whose KV is final. The pending token sits at position c
pending token  the last emitted token; its KV is written by the next step
draft          a proposed token; verify: target forward over pending + drafts; accept: longest valid prefix;
               commit: the state change
bonus token    the target's own token after the accepted prefix; becomes the pending token
num_emitted    n: tokens a slot gained this step, 0..K+1: accepted + 1, fewer if a stop or the limit cuts, 0 if not live
limit          min(prompt_len + max_tokens, max_model_len) - 1: the final committed_len; the last token needs no KV
known_len      the host's last read committed_len; reserved_len: its upper bound for it
draft_len      K: drafts per slot this step (compile-time); draft_cap: a slot's own limit, <= K (data)

Dimensions
----------
B slots   K draft tokens   W = K+1 verify width   E emitted tokens per slot, padded
(of a tree K counts nodes, and E is one more than its depth: of a chain E = W)
F rows of carried features   J features of a row
T packed tokens   S positions   P page-table entries   N pages in the pool   Z positions per page
D model width   H query heads   G KV heads   C head channels   R latent width (MLA)   V vocabulary   L layers
Y prefilled slots a launch   I stop ids   Q log-probabilities listed
A logit biases   M bad words   O tokens of a bad word
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.core.layout import Column, ListSizes, PrefillColumn
from mtp_jax.core.outputs import Accepted as Accepted
from mtp_jax.core.outputs import Logprobs as Logprobs
from mtp_jax.core.outputs import PackedOutputs as PackedOutputs
from mtp_jax.core.outputs import StepOutputs as StepOutputs
from mtp_jax.core.outputs import Verified as Verified


@dataclass(frozen=True)
class KVSpec:
    """Channels that one layer stores per position.

    `num_kv_heads` G and `k_channels` C; `v_channels` is None for a latent cache (MLA), whose values are the leading
    channels of its keys. `kv_heads` is the logical axis of G ("kv_heads", or None when every shard keeps a full copy).
    """

    num_kv_heads: int
    k_channels: int
    v_channels: int | None
    axis: str | None


@struct.dataclass
class LayerKV:
    """One layer's page pool. `v_pages` is None for a latent cache, whose values are leading channels of the keys."""

    k_pages: Float[Array, "N Z G C"]
    v_pages: Float[Array, "N Z G E"] | None


@struct.dataclass
class Needs:
    """What some slot of the group needs in this launch.

    The same on every device, since branches with collectives in them follow it. A plain bool is known when the program
    is compiled: see `ops.branches`.
    """

    whole_logits: Bool[Array, ""] | bool  # a row's token is not simply the most likely one
    logprobs: Bool[Array, ""] | bool
    prompt_logprobs: Bool[Array, ""] | bool

    @classmethod
    def nothing(cls) -> "Needs":
        """Of programs in which every token is simply the most likely one, and nobody asks how likely."""
        return cls(whole_logits=False, logprobs=False, prompt_logprobs=False)


@struct.dataclass
class TokenLists:
    """The longer lists that each slot's request brought. Writer: prefill; of a list, its first entries are in use."""

    bias_ids_BA: Int[Array, "B A"]
    biases_BA: Float[Array, "B A"]
    bad_words_BMO: Int[Array, "B M O"]  # each ends at the end of its room; NO_TOKEN before it

    @classmethod
    def unpack(cls, packed_BX: Int[Array, "B X"], sizes: ListSizes) -> "TokenLists":
        """Of the columns that `ListSizes` describes."""
        num_biases = sizes.num_biases
        words_BX = packed_BX[:, 2 * num_biases :]
        return cls(
            bias_ids_BA=packed_BX[:, :num_biases],
            biases_BA=lax.bitcast_convert_type(packed_BX[:, num_biases : 2 * num_biases], jnp.float32),
            bad_words_BMO=words_BX.reshape(len(packed_BX), sizes.num_bad_words, sizes.bad_word_len),
        )


@struct.dataclass
class SamplingRows:
    """How each slot draws its tokens. Owner: host, through the launch's inputs."""

    key_B2: UInt32[Array, "B 2"]
    temperature_B: Float[Array, " B"]  # 0: greedy
    top_k_B: Int[Array, " B"]  # 0 or -1: off
    top_p_B: Float[Array, " B"]  # 1: off
    min_p_B: Float[Array, " B"]  # 0: off
    num_logprobs_B: Int[Array, " B"]  # -1: none wanted
    thinking_ids_B2: Int[Array, "B 2"]  # the tokens that begin and end a thinking part; NO_TOKEN: never
    prompt_len_B: Int[Array, " B"]  # the request's own prompt: what follows it in the slot's text, it wrote
    min_tokens_B: Int[Array, " B"]  # `stop_ids_BI` are banned until so many are written
    presence_penalty_B: Float[Array, " B"]  # 0: off
    frequency_penalty_B: Float[Array, " B"]  # 0: off
    repetition_penalty_B: Float[Array, " B"]  # 1: off
    num_biases_B: Int[Array, " B"]
    num_bad_words_B: Int[Array, " B"]
    num_stop_ids_B: Int[Array, " B"]
    stop_ids_BI: Int[Array, "B I"]  # the first `num_stop_ids_B` end the text; what follows them is only held back
    lists: TokenLists | None = None  # of the slots' state; None: nobody has any
    agreed: Needs | None = None  # None where nobody else launches: these rows alone say what is needed

    @property
    def is_penalised(self) -> Bool[Array, " B"]:
        """Slots whose logits depend on how often each token stands in the text."""
        return (self.presence_penalty_B != 0) | (self.frequency_penalty_B != 0) | (self.repetition_penalty_B != 1)

    @property
    def is_edited(self) -> Bool[Array, " B"]:
        """Slots for which even greedy decoding looks at other logits than the model's own."""
        return self.is_penalised | (self.min_tokens_B > 0) | (self.num_biases_B > 0) | (self.num_bad_words_B > 0)

    @property
    def draws(self) -> Bool[Array, ""] | bool:
        """Whether some of these slots' tokens are drawn with noise."""
        return self.needs.whole_logits is not False and jnp.any(self.temperature_B > 0)

    @property
    def edits(self) -> Bool[Array, ""] | bool:
        """Whether some of these slots' logits are edited."""
        return self.needs.whole_logits is not False and jnp.any(self.is_edited)

    @property
    def needs(self) -> Needs:
        """What was agreed, or what these rows say."""
        if self.agreed is not None:
            return self.agreed
        return Needs(
            whole_logits=jnp.any((self.temperature_B > 0) | self.is_edited),
            logprobs=jnp.any(self.num_logprobs_B >= 0),
            prompt_logprobs=jnp.zeros((), bool),  # a prefill alone can know
        )


@struct.dataclass
class TokenFacts:
    """What each slot's text and lists say before a launch's drafts; zeros unless a slot of the launch edits logits."""

    num_in_prompt_BV: Int[Array, "B V"]
    num_written_BV: Int[Array, "B V"]  # after the prompt, up to the pending token
    bias_BV: Float[Array, "B V"]
    tail_BO: Int[Array, "B O"]  # the last tokens written, as many as a bad word may begin with; -2: none


@struct.dataclass
class DecodeState:
    """What travels from launch to launch on the device; donated to each. Slot arrays have size max_num_seqs."""

    kv: tuple[LayerKV, ...]  # target pages. Writers: verify, prefill, through ops.kv_cache
    draft_kv: tuple[LayerKV, ...]  # MTP pages, same page ids. Writer: the proposer
    committed_len: Int[
        Array, " B"
    ]  # positions whose KV is final; the pending token sits here. Writers: commit, prefill
    pending_token: Int[Array, " B"]  # Writers: commit, prefill
    history_BS: Int[Array, "B S"]  # tokens by position, known through committed_len. Writers: commit, prefill
    lists: TokenLists  # of the slots' requests. Writer: prefill
    finished: Bool[Array, " B"]  # a stop was emitted or the limit reached. Writers: commit, prefill
    carry: Any  # the proposer's own; shape fixed by the config, never by the bucket


@struct.dataclass
class SlotView:
    """One launch's facts about the slots in its bucket: inputs of the host joined with the state of the device."""

    committed_len: Int[Array, " B"]
    pending_token: Int[Array, " B"]
    live: Bool[Array, " B"]  # scheduled by the host and not finished on the device
    draft_cap: Int[Array, " B"]  # min(host's cap, limit - committed_len - 1), 0 where not live
    num_positions: Int[Array, " B"]  # from committed_len on, that this launch may write; drafters of trees keep to it
    limit: Int[Array, " B"]
    page_table_BP: Int[Array, "B P"]
    history_BS: Int[Array, "B S"]  # tokens by position, the pending one at committed_len included; no meaning past it
    sampling: SamplingRows
    noise_BWV: Float[Array, "B W V"]  # of the tokens at positions c+1..c+W (a tree: c+E); drafts and target share it
    facts: TokenFacts  # of the text through position c


@struct.dataclass
class StepInputs:
    """A decode launch's upload, unpacked. Owner: host; packed by engine/batch.py."""

    live: Bool[Array, " B"]
    draft_cap: Int[Array, " B"]
    limit: Int[Array, " B"]
    page_table_BP: Int[Array, "B P"]
    sampling: SamplingRows

    @classmethod
    def unpack(cls, packed_BX: Int[Array, "B X"], *, num_stop_ids: int, agreed: Needs | None = None) -> "StepInputs":
        """Inverse of `engine.batch`'s packing: fixed columns, then stop ids, then the page table."""

        def column(name: Column) -> Array:
            return packed_BX[:, name]

        def float_column(name: Column) -> Array:
            return lax.bitcast_convert_type(column(name), jnp.float32)

        table_start = len(Column) + num_stop_ids
        keys = packed_BX[:, Column.KEY_HIGH : Column.KEY_LOW + 1]
        return cls(
            live=column(Column.LIVE) != 0,
            draft_cap=column(Column.DRAFT_CAP),
            limit=column(Column.LIMIT),
            page_table_BP=packed_BX[:, table_start:],
            sampling=SamplingRows(
                key_B2=lax.bitcast_convert_type(keys, jnp.uint32),
                temperature_B=float_column(Column.TEMPERATURE),
                top_k_B=column(Column.TOP_K),
                top_p_B=float_column(Column.TOP_P),
                min_p_B=float_column(Column.MIN_P),
                num_logprobs_B=column(Column.NUM_LOGPROBS),
                thinking_ids_B2=packed_BX[:, Column.THINKING_BEGINS : Column.THINKING_ENDS + 1],
                prompt_len_B=column(Column.PROMPT_LEN),
                min_tokens_B=column(Column.MIN_TOKENS),
                num_stop_ids_B=column(Column.NUM_STOP_IDS),
                presence_penalty_B=float_column(Column.PRESENCE_PENALTY),
                frequency_penalty_B=float_column(Column.FREQUENCY_PENALTY),
                repetition_penalty_B=float_column(Column.REPETITION_PENALTY),
                num_biases_B=column(Column.NUM_BIASES),
                num_bad_words_B=column(Column.NUM_BAD_WORDS),
                stop_ids_BI=packed_BX[:, len(Column) : table_start],
                agreed=agreed,
            ),
        )


@struct.dataclass
class PrefillInputs:
    """A prefill launch's upload, unpacked: one chunk of a prompt for each of Y slots (Y = 1 on one data shard)."""

    slot: Int[Array, " Y"]
    start: Int[Array, " Y"]  # position of the chunk's first token
    num_tokens: Int[Array, " Y"]  # real tokens of the chunk; 0 for a padding row
    num_known: Int[Array, " Y"]  # prompt tokens, earlier emitted ones of a resumed request included
    is_first: Bool[Array, " Y"]  # the slot's first chunk, wherever it starts
    is_last: Bool[Array, " Y"]  # the chunk ends the prompt: a first token is drawn or resumed
    pending_token: Int[Array, " Y"]  # a resumed request's known pending token, else NO_TOKEN
    wants_prompt_logprobs: Bool[Array, " Y"]
    text_YS: Int[Array, "Y S"]  # the whole prompt, what it shares with others included; then zeros
    lists: TokenLists
    inputs: StepInputs  # its `sampling` knows the lists

    def tokens_from(self, offset: int, length: int) -> Int[Array, "Y T"]:
        """`length` tokens from the chunk's start + `offset` on; past the prompt they mean nothing."""
        positions_YT = self.start[:, None] + jnp.arange(offset, offset + length, dtype=jnp.int32)[None, :]
        return jnp.take_along_axis(self.text_YS, positions_YT, axis=1, mode="clip")

    @property
    def needs_prompt_logprobs(self) -> Bool[Array, ""] | bool:
        """What was agreed, or what these rows say."""
        agreed = self.inputs.sampling.agreed
        return jnp.any(self.wants_prompt_logprobs) if agreed is None else agreed.prompt_logprobs

    @classmethod
    def unpack(
        cls,
        packed_YX: Int[Array, "Y X"],
        *,
        num_stop_ids: int,
        list_sizes: ListSizes,
        max_model_len: int,
        agreed: Needs | None = None,
    ) -> "PrefillInputs":
        """Inverse of `engine.batch`'s packing; `max_model_len` is the width of `text_YS`."""
        tokens_start = packed_YX.shape[1] - max_model_len
        step_end = tokens_start - list_sizes.num_columns
        inputs = StepInputs.unpack(
            packed_YX[:, len(PrefillColumn) : step_end], num_stop_ids=num_stop_ids, agreed=agreed
        )
        lists = TokenLists.unpack(packed_YX[:, step_end:tokens_start], list_sizes)
        fields = {column: packed_YX[:, column] for column in PrefillColumn}
        return cls(
            slot=fields[PrefillColumn.SLOT],
            start=fields[PrefillColumn.START],
            num_tokens=fields[PrefillColumn.NUM_TOKENS],
            num_known=fields[PrefillColumn.NUM_KNOWN],
            is_first=fields[PrefillColumn.IS_FIRST] != 0,
            is_last=fields[PrefillColumn.IS_LAST] != 0,
            pending_token=fields[PrefillColumn.PENDING_TOKEN],
            wants_prompt_logprobs=fields[PrefillColumn.PROMPT_LOGPROBS] != 0,
            text_YS=packed_YX[:, tokens_start:],
            lists=lists,
            inputs=inputs.replace(sampling=inputs.sampling.replace(lists=lists)),  # type: ignore[attr-defined]
        )


@struct.dataclass
class Drafts:
    """What a proposer proposes; born and consumed inside one step.

    `probs_BKV` None means the law of each draft is one-hot (it was not drawn by a coin of its own): an argmax or a
    coupled draft. A rule that needs the law of sampled drafts gets the very array they were drawn from.
    `num_proposed`: how many of a slot's drafts the proposer stands by, where it may be fewer than K; the rest is filler
    and is neither accepted nor counted.
    `parent_BK` None means a chain. Else draft k follows row `parent_BK[k]`: 0 is the pending token, j + 1 draft j;
    parents come before children, so that the first `draft_cap` drafts are a tree too. Siblings differ in their tokens.
    """

    tokens_BK: Int[Array, "B K"]
    probs_BKV: Float[Array, "B K V"] | None = None
    num_proposed: Int[Array, " B"] | None = None
    parent_BK: Int[Array, "B K"] | None = None


@struct.dataclass
class RowText:
    """What stands before the token that each row of a launch speaks of: tokens of the slot, then drafts of the launch.

    Row w of slot b speaks after `history_BS[b, :num_known[b]]` and those drafts k for which `is_before_BWK[b, w, k]`.
    """

    history_BS: Int[Array, "B S"]
    num_known: Int[Array, " B"]
    drafts_BK: Int[Array, "B K"]
    is_before_BWK: Bool[Array, "B W K"]
    facts: TokenFacts  # of the history


def slot_prefix(tree: Any, num_slots: int) -> Any:
    """The first `num_slots` slots of every array in a slot-major pytree."""
    return jax.tree.map(lambda x: x[:num_slots], tree)


def with_slot_prefix(tree: Any, prefix: Any) -> Any:
    """`tree` with its leading slots replaced by `prefix`.

    Not `full.at[:n].set`: jaxlib 0.11.2 crashes when it partitions one that replaces everything.
    """
    return jax.tree.map(lambda full, part: lax.dynamic_update_slice_in_dim(full, part, 0, axis=0), tree, prefix)
