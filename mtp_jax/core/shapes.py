"""Static shapes, and the one place where a bucket is chosen. Number of compiled programs == number of shapes here."""

from dataclasses import dataclass

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import InvariantError

_SLOT_STEP = 4
_SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class StepShape:
    """A decode program: `slots` B, a prefix of each data shard's state, and `draft_len` K; W = K + 1 rows a slot."""

    slots: int
    draft_len: int


@dataclass(frozen=True)
class PrefillShape:
    """A prefill program: `chunk` prompt tokens of one slot in each data shard."""

    chunk: int


Shape = StepShape | PrefillShape


@dataclass(frozen=True)
class ShapeGrid:
    """Every shape an engine may launch. All of them are compiled at start and none later.

    `min_draft_len`: shorter drafts are not compiled, for measurements of one length alone.
    """

    slot_buckets: tuple[int, ...]
    max_draft_len: int
    chunk_buckets: tuple[int, ...]
    min_draft_len: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> "ShapeGrid":
        """Slot buckets 1, 8, 32, 128, ... up to a data shard's slots; chunks 16, 64, 256, ... up to `prefill_chunk`.

        >>> grid = ShapeGrid.of(EngineConfig(max_model_len=512, max_num_seqs=40))
        >>> grid.slot_buckets, grid.chunk_buckets
        ((1, 8, 32, 40), (16, 64, 256))
        """
        slots = [1]
        bucket = 8
        while bucket < config.slots_per_shard:
            slots.append(bucket)
            bucket *= _SLOT_STEP
        if config.slots_per_shard > 1:
            slots.append(config.slots_per_shard)
        longest = min(config.prefill_chunk, config.max_model_len)
        chunks: list[int] = []
        chunk = _SMALLEST_CHUNK
        while chunk < longest:
            chunks.append(chunk)
            chunk *= _SLOT_STEP
        return cls(tuple(slots), config.max_draft_len, (*chunks, longest))

    def choose(self, num_slots: int, draft_len: int) -> StepShape:
        """The smallest compiled shape that covers slots 0..num_slots-1 with exactly `draft_len` drafts."""
        if not self.min_draft_len <= draft_len <= self.max_draft_len:
            compiled = f"{self.min_draft_len}..{self.max_draft_len}"
            raise InvariantError(f"draft length {draft_len} is outside the compiled range {compiled}")
        return StepShape(_smallest_bucket(self.slot_buckets, num_slots), draft_len)

    def choose_prefill(self, num_tokens: int) -> PrefillShape:
        """The smallest compiled chunk that holds `num_tokens`, or the largest one: the rest follows in later chunks."""
        return PrefillShape(_smallest_bucket(self.chunk_buckets, min(num_tokens, self.chunk_buckets[-1])))

    def all_steps(self) -> tuple[StepShape, ...]:
        """Decode shapes, smallest first."""
        draft_lens = range(self.min_draft_len, self.max_draft_len + 1)
        return tuple(StepShape(slots, draft_len) for slots in self.slot_buckets for draft_len in draft_lens)

    def all_prefills(self) -> tuple[PrefillShape, ...]:
        """Prefill shapes, smallest first."""
        return tuple(PrefillShape(chunk) for chunk in self.chunk_buckets)


def _smallest_bucket(buckets: tuple[int, ...], needed: int) -> int:
    for bucket in buckets:
        if bucket >= needed:
            return bucket
    raise InvariantError(f"{needed} exceeds the largest compiled bucket {buckets[-1]}")
