"""A decision and the host's tables as one numpy array, uploaded in one explicit transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int32

from mtp_jax.core.config import EngineConfig, SamplingParams
from mtp_jax.core.layout import NO_LOGPROBS, NO_TOKEN, AgreedColumn, Column, PrefillColumn, VoteColumn
from mtp_jax.core.shapes import Shape, StepShape
from mtp_jax.engine.decisions import LaunchDecision, PrefillDecision, StepDecision
from mtp_jax.engine.slots import Slot, SlotTable
from mtp_jax.ops.placement import Placement


@dataclass
class _CachedRow:
    admission: int
    num_pages: int
    row_X: Int32[np.ndarray, " X"]


@dataclass(frozen=True)
class _Upload:
    packed_BX: Int32[np.ndarray, "B X"]
    on_device: jax.Array


class BatchBuilder:
    """Builds the uploads: one row per slot of the bucket (decode) or one per data shard (prefill), shard after shard.

    Rows that did not change since the last launch are kept. Where the group votes, a shard's wish ends its first row.
    """

    def __init__(self, config: EngineConfig, placement: Placement, *, is_voting: bool = False) -> None:
        self._num_stop_ids = config.max_stop_token_ids
        self._list_sizes = config.list_sizes
        self._pages_per_slot = config.pages_per_slot
        self._placement = placement
        self._max_model_len = config.max_model_len
        self._vote_width = len(AgreedColumn) + len(VoteColumn) if is_voting else 0
        self._rows: dict[tuple[int, int], _CachedRow] = {}  # by shard and slot
        self._uploads: dict[Shape, _Upload] = {}  # the last one of each shape

    @property
    def row_width(self) -> int:
        """Columns of a slot's row: fixed ones, stop ids, page table."""
        return len(Column) + self._num_stop_ids + self._pages_per_slot

    def idle_inputs(self, shape: Shape) -> Int32[np.ndarray, "B X"]:
        """An upload of this process's shards in which nobody takes part: not live, null pages, greedy, no wish."""
        num_shards = self._placement.num_local_shards
        if isinstance(shape, StepShape):
            packed_BX = np.zeros((num_shards * shape.slots, self.row_width + self._vote_width), np.int32)
            packed_BX[:, list(_IDLE)] = list(_IDLE.values())
            return packed_BX
        width = len(PrefillColumn) + self.row_width + self._list_sizes.num_columns + self._max_model_len
        packed_YX = np.zeros((num_shards, width + self._vote_width), np.int32)
        packed_YX[:, [len(PrefillColumn) + column for column in _IDLE]] = list(_IDLE.values())
        return packed_YX

    def build(self, launch: LaunchDecision, tables: Sequence[SlotTable]) -> jax.Array:
        """The launch's inputs on the devices; `tables[i]` belongs to `launch.shards[i]`."""
        packed = self.idle_inputs(launch.shape)
        rows_per_shard = len(packed) // len(launch.shards)
        for shard, (decision, table) in enumerate(zip(launch.shards, tables, strict=True)):
            part = packed[shard * rows_per_shard : (shard + 1) * rows_per_shard]
            if isinstance(decision, StepDecision):
                self._fill_step(part, decision, table, shard)
            elif decision is not None:
                self._fill_prefill(part[0], decision, table, shard)
            if launch.wishes:
                part[0, -self._vote_width :] = [*launch.needs.columns(), *launch.wishes[shard].columns()]
        return self._uploaded(launch.shape, packed)

    def _uploaded(self, shape: Shape, packed: Int32[np.ndarray, "B X"]) -> jax.Array:
        """On the devices. Between two page boundaries a decode's inputs are those of the launch before."""
        last = self._uploads.get(shape)
        if last is None or not np.array_equal(last.packed_BX, packed):
            last = self._uploads[shape] = _Upload(packed, self._placement.put_rows(packed))
        return last.on_device

    def _fill_step(
        self, packed_BX: Int32[np.ndarray, "B X"], decision: StepDecision, table: SlotTable, shard: int
    ) -> None:
        for decided in decision.slots:
            slot = table.find(decided.slot, decided.admission)
            if slot is not None:
                row_X = packed_BX[decided.slot]
                row_X[: self.row_width] = self._row(slot, shard)
                row_X[Column.LIVE] = 1
                row_X[Column.DRAFT_CAP] = decided.draft_cap

    def _fill_prefill(
        self, packed_X: Int32[np.ndarray, " X"], decision: PrefillDecision, table: SlotTable, shard: int
    ) -> None:
        """The chunk's facts, the slot's row and lists, its whole prompt."""
        slot = table.find(decision.slot, decision.admission)
        if slot is None:
            return
        facts = {
            PrefillColumn.SLOT: decision.slot,
            PrefillColumn.START: decision.start,
            PrefillColumn.NUM_TOKENS: decision.num_tokens,
            PrefillColumn.NUM_KNOWN: len(slot.prompt),
            PrefillColumn.IS_FIRST: int(decision.is_first),
            PrefillColumn.IS_LAST: int(decision.is_last),
            PrefillColumn.PENDING_TOKEN: NO_TOKEN if slot.pending_token is None else slot.pending_token,
            PrefillColumn.PROMPT_LOGPROBS: int(bool(decision.scored)),
        }
        packed_X[list(facts)] = list(facts.values())
        row_start = len(PrefillColumn)
        packed_X[row_start : row_start + self.row_width] = self._row(slot, shard)
        packed_X[row_start + Column.LIVE] = 1
        list_start = row_start + self.row_width
        token_start = list_start + self._list_sizes.num_columns
        self._fill_lists(packed_X[list_start:token_start], slot.state.request.params)
        packed_X[token_start : token_start + len(slot.prompt)] = slot.prompt

    def _row(self, slot: Slot, shard: int) -> Int32[np.ndarray, " X"]:
        cached = self._rows.get((shard, slot.index))
        if cached is None or (cached.admission, cached.num_pages) != (slot.admission, len(slot.pages)):
            cached = _CachedRow(slot.admission, len(slot.pages), self._fresh_row(slot))
            self._rows[shard, slot.index] = cached
        return cached.row_X

    def _fill_lists(self, packed_X: Int32[np.ndarray, " X"], params: SamplingParams) -> None:
        sizes, bias = self._list_sizes, params.logit_bias or {}
        packed_X[: len(bias)] = list(bias)
        packed_X[sizes.num_biases : sizes.num_biases + len(bias)] = _float_bits(list(bias.values()))
        words_MO = packed_X[2 * sizes.num_biases :].reshape(sizes.num_bad_words, sizes.bad_word_len)
        words_MO[:] = NO_TOKEN
        for room_O, word in zip(words_MO, params.bad_words or (), strict=False):
            room_O[-len(word) :] = word

    def _fresh_row(self, slot: Slot) -> Int32[np.ndarray, " X"]:
        request = slot.state.request
        params = request.params
        row_X = np.zeros((self.row_width,), np.int32)
        thinking_begins, thinking_ends = params.thinking_token_ids or (NO_TOKEN, NO_TOKEN)
        integers = {
            Column.LIMIT: slot.state.limit,
            Column.TOP_K: min(params.top_k, _LARGEST),
            Column.NUM_LOGPROBS: NO_LOGPROBS if params.logprobs is None else params.logprobs,
            Column.PROMPT_LEN: len(request.prompt),
            Column.MIN_TOKENS: min(params.min_tokens, _LARGEST),
            Column.NUM_STOP_IDS: len(request.stop_ids),
            Column.NUM_BIASES: len(params.logit_bias or ()),
            Column.NUM_BAD_WORDS: len(params.bad_words or ()),
            Column.THINKING_BEGINS: thinking_begins,
            Column.THINKING_ENDS: thinking_ends,
        }
        floats = {
            Column.TEMPERATURE: params.temperature,
            Column.TOP_P: params.top_p,
            Column.MIN_P: params.min_p,
            Column.PRESENCE_PENALTY: params.presence_penalty,
            Column.FREQUENCY_PENALTY: params.frequency_penalty,
            Column.REPETITION_PENALTY: params.repetition_penalty,
        }
        row_X[list(integers)] = list(integers.values())
        row_X[list(floats)] = _float_bits(list(floats.values()))
        row_X[[Column.KEY_HIGH, Column.KEY_LOW]] = np.array(
            [request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32
        ).view(np.int32)
        stop_start = len(Column)
        row_X[stop_start : stop_start + self._num_stop_ids] = NO_TOKEN
        row_X[stop_start : stop_start + len(request.held_back_ids)] = request.held_back_ids
        table_start = stop_start + self._num_stop_ids
        row_X[table_start : table_start + len(slot.pages)] = slot.pages
        return row_X


def _float_bits(values: Sequence[float]) -> Int32[np.ndarray, " X"]:
    return np.array(values, np.float32).view(np.int32)


_LARGEST = 2**31 - 1
_IDLE = {Column.NUM_LOGPROBS: NO_LOGPROBS, Column.REPETITION_PENALTY: int(_float_bits([1.0])[0])}
"""Columns of a row in which nobody takes part, where they are not 0: it must need nothing."""
