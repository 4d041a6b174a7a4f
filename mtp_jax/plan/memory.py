"""Bytes on a device: weights, KV a token, state a slot, and what a step needs beside them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.types import DecodeState, KVSpec
from mtp_jax.models.api import TensorSpec
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.ops.kv_cache import stored_specs
from mtp_jax.plan.program import PlannedStep

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Temporaries:
    """What a step needs beside weights and state: `fixed_bytes`, and `bytes_per_slot` for each slot of a data shard.

    `source` says where the figures come from: "compiled", or "estimate".
    """

    fixed_bytes: float
    bytes_per_slot: float
    source: str

    def of(self, slots_per_shard: int) -> float:
        """For so many slots of a data shard."""
        return self.fixed_bytes + slots_per_shard * self.bytes_per_slot


@dataclass(frozen=True)
class Memory:
    """One device's memory. `usable_bytes` is the part of the chip's that may be used."""

    usable_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    state_bytes_per_slot: int
    temporaries: Temporaries
    page_size: int
    num_data_shards: int
    max_context: int

    @property
    def bytes_per_token(self) -> int:
        """KV of target and drafter."""
        return self.kv_bytes_per_token + self.draft_kv_bytes_per_token

    def used_bytes(self, batch: int, context: int) -> float:
        """With `batch` requests over all data shards, each of `context` tokens."""
        slots = -(-batch // self.num_data_shards)
        pages = slots * -(-context // self.page_size) + 1  # and the null page
        return (
            self.weight_bytes
            + pages * self.page_size * self.bytes_per_token
            + slots * self.state_bytes_per_slot
            + self.temporaries.of(slots)
        )

    def largest_batch(self, context: int) -> int:
        """Requests of `context` tokens that fit at once, over all data shards; 0 where none does."""
        return self.num_data_shards * _largest(
            lambda slots: self.used_bytes(slots * self.num_data_shards, context) <= self.usable_bytes
        )

    def longest_context(self, batch: int) -> int:
        """Tokens that each of `batch` requests can have, in whole pages: at most the model's own limit.

        0 where not even one page fits.
        """
        num_pages = _largest(lambda pages: self.used_bytes(batch, pages * self.page_size) <= self.usable_bytes)
        return min(num_pages * self.page_size, self.max_context)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, found by doubling and halving; 0 where 1 does not."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Local:
    """One device's part of things that are split over a mesh."""

    def __init__(self, step: PlannedStep) -> None:
        self._rules = step.target.placement.rules
        self._sizes = {"data": step.config.mesh.data, "model": step.config.mesh.model}

    def parts(self, axis: str | None) -> int:
        """Devices over which a dimension with this logical axis is split."""
        return math.prod(self._sizes[name] for name in self._rules.mesh_axes(axis))

    def size(self, spec: TensorSpec) -> int:
        """Elements of a weight."""
        return math.prod(size // self.parts(axis) for size, axis in zip(spec.shape, spec.axes, strict=True))

    def num_bytes(self, spec: TensorSpec, dtype: str) -> int:
        """Bytes of a weight of a model in `dtype`."""
        return self.size(spec) * jax.numpy.dtype(spec.dtype or dtype).itemsize

    def kv_bytes(self, specs: tuple[KVSpec, ...], dtype: str) -> int:
        """Bytes of a position in these layers."""
        channels = sum(
            spec.num_kv_heads // self.parts(spec.axis) * (spec.k_channels + (spec.v_channels or 0)) for spec in specs
        )
        return channels * jax.numpy.dtype(dtype).itemsize


def memory_of(step: PlannedStep, temporaries: Temporaries, *, share: float) -> Memory:
    """What `step` takes of a device; `share` of the chip's memory may be used."""
    local, config = Local(step), step.config
    backend = config.attention_backend
    draft_specs = step.program.proposer.draft_kv_specs(step.family)
    return Memory(
        usable_bytes=int(step.target.slice.chip.hbm_bytes * share),
        weight_bytes=sum(local.num_bytes(spec, step.dtype) for spec in step.family.tensors()),
        kv_bytes_per_token=local.kv_bytes(stored_specs(step.family.kv_specs(), backend), step.dtype),
        draft_kv_bytes_per_token=local.kv_bytes(stored_specs(draft_specs, backend), step.dtype),
        state_bytes_per_slot=_state_bytes(step.state(), config),
        temporaries=temporaries,
        page_size=config.cache.page_size,
        num_data_shards=config.mesh.data,
        max_context=step.family.max_position_embeddings,
    )


def _state_bytes(state: DecodeState, config: EngineConfig) -> int:
    """Bytes of all state but the page pools, by slot; each slot's is on the devices of its data shard alone."""
    pools: list[Any] = [state.kv, state.draft_kv]
    num_bytes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (state, pools)]
    return (num_bytes[0] - num_bytes[1]) // config.max_num_seqs


def estimated_temporaries(family: MtpDecoder, config: EngineConfig, local: Local, dtype: str) -> Temporaries:
    """At least what any compiler must hold at once; a real one holds more, and --compile says how much.

    Of logits, for every row: the target's, the noise and the law that a request makes of them, in float32; for every
    slot how often each token stands in prompt and output, and its bias. Beside them the widest product of a layer.
    """
    num_rows = config.topology.num_drafts(config.max_draft_len) + 1
    logits = (3 * num_rows + 3) * family.vocab_size * _FLOAT32_BYTES
    itemsize = jax.numpy.dtype(dtype).itemsize
    widest = 2 * family.ffn_size // local.parts("ffn")
    if family.moe is not None:
        pairs = min(family.moe.num_active, family.moe.num_experts // local.parts("experts")) * config.mesh.data
        widest = max(widest, 2 * pairs * family.moe.expert_ffn_size)
    return Temporaries(0.0, logits + num_rows * (widest + 2 * family.hidden_size) * itemsize, "estimate")
