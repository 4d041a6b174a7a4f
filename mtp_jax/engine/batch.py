"""A decision and the host's tables as one numpy array, uploaded in one explicit transfer."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int32

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.layout import NO_LOGPROBS, NO_TOKEN, Column, PrefillColumn
from mtp_jax.engine.decisions import PrefillDecision, StepDecision
from mtp_jax.engine.slots import Slot, SlotTable


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
    """Builds the uploads. Rows that did not change since the last launch are kept."""

    def __init__(self, config: EngineConfig, *, lookahead: int) -> None:
        self._num_stop_ids = config.max_stop_token_ids
        self._pages_per_slot = config.pages_per_slot
        self._lookahead = lookahead
        self._rows: dict[int, _CachedRow] = {}
        self._uploads: dict[int, _Upload] = {}  # the last one of each slot bucket

    @property
    def row_width(self) -> int:
        """Columns of a slot's row: fixed ones, stop ids, page table."""
        return len(Column) + self._num_stop_ids + self._pages_per_slot

    def prefill_width(self, chunk: int) -> int:
        """Columns of a prefill upload's row."""
        return len(PrefillColumn) + self.row_width + chunk + self._lookahead

    def build_step_inputs(self, decision: StepDecision, slots: SlotTable) -> jax.Array:
        """[B, X] for the decision's bucket; slots that take no part are all zeros: not live, null pages, greedy."""
        packed_BX = np.zeros((decision.shape.slots, self.row_width), np.int32)
        packed_BX[:, Column.NUM_LOGPROBS] = NO_LOGPROBS
        for decided in decision.slots:
            slot = slots.find(decided.slot, decided.admission)
            if slot is not None:
                packed_BX[decided.slot] = self._row(slot)
                packed_BX[decided.slot, Column.LIVE] = 1
                packed_BX[decided.slot, Column.DRAFT_CAP] = decided.draft_cap
        return self._uploaded(packed_BX)

    def _uploaded(self, packed_BX: Int32[np.ndarray, "B X"]) -> jax.Array:
        """The launch's inputs on the device. Between two page boundaries they are those of the launch before."""
        last = self._uploads.get(len(packed_BX))
        if last is None or not np.array_equal(last.packed_BX, packed_BX):
            last = self._uploads[len(packed_BX)] = _Upload(packed_BX, jax.device_put(packed_BX))
        return last.on_device

    def build_prefill_inputs(self, decision: PrefillDecision, slots: SlotTable) -> jax.Array:
        """[1, X]: the chunk's facts, the slot's row, the chunk's tokens and those after it that drafting looks at."""
        slot = slots.find(decision.slot, decision.admission)
        chunk = decision.shape.chunk
        packed_YX = np.zeros((1, self.prefill_width(chunk)), np.int32)
        if slot is not None:
            facts = {
                PrefillColumn.SLOT: decision.slot,
                PrefillColumn.START: decision.start,
                PrefillColumn.NUM_TOKENS: decision.num_tokens,
                PrefillColumn.NUM_KNOWN: len(slot.prompt),
                PrefillColumn.IS_LAST: int(decision.is_last),
                PrefillColumn.PENDING_TOKEN: NO_TOKEN if slot.pending_token is None else slot.pending_token,
            }
            packed_YX[0, list(facts)] = list(facts.values())
            row_start = len(PrefillColumn)
            packed_YX[0, row_start : row_start + self.row_width] = self._row(slot)
            packed_YX[0, row_start + Column.LIVE] = 1
            tokens = slot.prompt[decision.start : decision.start + decision.num_tokens + self._lookahead]
            token_start = row_start + self.row_width
            packed_YX[0, token_start : token_start + len(tokens)] = tokens
        return jax.device_put(packed_YX)

    def _row(self, slot: Slot) -> Int32[np.ndarray, " X"]:
        cached = self._rows.get(slot.index)
        if cached is None or (cached.admission, cached.num_pages) != (slot.admission, len(slot.pages)):
            cached = _CachedRow(slot.admission, len(slot.pages), self._fresh_row(slot))
            self._rows[slot.index] = cached
        return cached.row_X

    def _fresh_row(self, slot: Slot) -> Int32[np.ndarray, " X"]:
        request = slot.state.request
        params = request.params
        row_X = np.zeros((self.row_width,), np.int32)
        row_X[Column.LIMIT] = slot.state.limit
        row_X[[Column.KEY_HIGH, Column.KEY_LOW]] = np.array(
            [request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32
        ).view(np.int32)
        row_X[[Column.TEMPERATURE, Column.TOP_P]] = np.array([params.temperature, params.top_p], np.float32).view(
            np.int32
        )
        row_X[Column.TOP_K] = min(params.top_k, 2**31 - 1)
        row_X[Column.NUM_LOGPROBS] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        stop_start = len(Column)
        row_X[stop_start : stop_start + self._num_stop_ids] = NO_TOKEN
        row_X[stop_start : stop_start + len(request.stop_ids)] = request.stop_ids
        table_start = stop_start + self._num_stop_ids
        row_X[table_start : table_start + len(slot.pages)] = slot.pages
        return row_X
