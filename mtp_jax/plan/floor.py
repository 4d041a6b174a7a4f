"""The least time that a step can take: what must be read, multiplied and sent, over what the chip can do.

A step is drafting, pass by pass, and then verifying. Each pass waits for the one before it, so their times add up; of a
pass the slower of memory and products counts, as if the other went on beside it. What is sent between chips may hide
behind all of that, so the step takes at least as long as the slower of the two:

    floor(K) = max(sum over passes of max(bytes / bandwidth, operations / rate), sent bytes / links)

Counted are weights (those of experts as far as tokens are expected to choose them, see `expected_experts`), KV of the
context, and products. Not counted is whatever a better program could avoid or hide: activations, logits, writing KV,
catching the drafter up, launching kernels, waiting for the first byte of a collective, the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import MTP_ROOT, TensorSpec
from mtp_jax.models.deepseek_v3 import MlaConfig
from mtp_jax.models.gqa import GqaConfig
from mtp_jax.plan.hlo import Collective
from mtp_jax.plan.memory import Local
from mtp_jax.plan.program import PlannedStep


def expected_experts(num_experts: int, num_active: int, num_tokens: int) -> float:
    """Experts that at least one of the tokens chooses, if each takes `num_active` of them, all as likely.

    >>> expected_experts(256, 8, 1)
    8.0
    >>> round(expected_experts(256, 8, 64), 1)
    222.4
    """
    return num_experts * (1 - (1 - num_active / num_experts) ** num_tokens)


@dataclass(frozen=True)
class Load:
    """What one device does in a pass."""

    weight_bytes: float = 0.0
    expert_bytes: float = 0.0
    kv_bytes: float = 0.0
    flop: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.weight_bytes + other.weight_bytes,
            self.expert_bytes + other.expert_bytes,
            self.kv_bytes + other.kv_bytes,
            self.flop + other.flop,
        )

    @property
    def num_bytes(self) -> float:
        """All that is read."""
        return self.weight_bytes + self.expert_bytes + self.kv_bytes


@dataclass(frozen=True)
class Floor:
    """A step's least time in seconds, and what makes it. `bound` names the largest part."""

    batch: int
    draft_len: int
    load: Load
    memory_s: float
    matrix_s: float
    compute_s: float  # sum over passes of the slower of the two
    links_s: float

    @property
    def seconds(self) -> float:
        """The floor."""
        return max(self.compute_s, self.links_s)

    @property
    def bound(self) -> str:
        """One of memory, products and links."""
        times = {"memory": self.memory_s, "products": self.matrix_s, "links": self.links_s}
        return max(times, key=lambda name: times[name])


class Roofline:
    """Floors of the steps of one planned program, with `context` tokens in every slot."""

    def __init__(self, step: PlannedStep, context: int) -> None:
        self._step, self._context = step, context
        self._local = Local(step)

    def floor(self, batch: int, draft_len: int, collectives: Sequence[Collective]) -> Floor:
        """Of a step of `batch` slots over all data shards; `collectives` are what its program exchanges."""
        chip = self._step.target.slice.chip
        passes = [*self._draft_passes(batch, draft_len), self._verify_pass(batch, draft_len)]
        load = sum(passes, Load())
        times = [(one.num_bytes / chip.hbm_bytes_s, one.flop / chip.flop_s) for one in passes]
        sent = sum(one.sent_bytes for one in collectives) / chip.send_bytes_s
        if chip.network_gb_s is not None:
            sent_far = sum(one.sent_to_hosts_bytes for one in collectives)
            sent = max(sent, sent_far / (chip.network_gb_s * 1e9))
        return Floor(
            batch=batch,
            draft_len=draft_len,
            load=load,
            memory_s=sum(memory for memory, _ in times),
            matrix_s=sum(matrix for _, matrix in times),
            compute_s=sum(max(pair) for pair in times),
            links_s=sent,
        )

    # ---- passes

    def _verify_pass(self, batch: int, draft_len: int) -> Load:
        family, rows = self._step.family, draft_len + 1
        layers = [spec for spec in family.tensors() if spec.path[0] in ("layers", "norm")]
        return (
            self._layers(layers, batch, rows) + self.attention(family.kv_specs(), batch, rows) + self._head(batch, rows)
        )

    def _draft_passes(self, batch: int, draft_len: int) -> list[Load]:
        """One for each draft of a layer that is applied again and again; one for each layer where each has its own."""
        family = self._step.family
        specs = self._step.program.proposer.draft_kv_specs(family)
        if not specs:
            return []
        is_recursive = len(specs) == 1
        depths = [0] * draft_len if is_recursive else list(range(len(specs)))
        return [
            self._layers(self._mtp_tensors(depth), batch, 1)
            + self.attention(specs[:1], batch, 1)
            + (self._head(batch, 1) if is_recursive or place < draft_len else Load())
            for place, depth in enumerate(depths)
        ]

    def _mtp_tensors(self, depth: int) -> list[TensorSpec]:
        return [spec for spec in self._step.family.tensors() if spec.path[:2] == (MTP_ROOT, str(depth))]

    # ---- their parts

    def _layers(self, tensors: Sequence[TensorSpec], batch: int, rows: int) -> Load:
        """Products with weights. Experts see the tokens of all data shards, the rest those of its own."""
        moe = self._step.family.moe
        load = Load()
        for spec in tensors:
            num_bytes, size = self._local.num_bytes(spec, self._step.dtype), self._local.size(spec)
            if "experts" in spec.axes and moe is not None:
                num_tokens = batch * rows
                active = expected_experts(moe.num_experts, moe.num_active, num_tokens) / moe.num_experts
                chosen = num_tokens * moe.num_active / moe.num_experts  # tokens an expert sees
                load += Load(expert_bytes=num_bytes * active, flop=2 * size * chosen)
            else:
                num_tokens = (
                    self._slots(batch) * rows if len(spec.shape) > 1 else 0
                )  # norms and biases multiply nothing
                load += Load(weight_bytes=num_bytes, flop=2 * size * num_tokens)
        return load

    def attention(self, specs: Sequence[KVSpec], batch: int, rows: int) -> Load:
        """Every position of the context is read once for all rows of its slot."""
        per_shard = self._slots(batch)
        kv = self._local.kv_bytes(tuple(specs), self._step.dtype) * self._context * per_shard
        per_position = self._products_per_position * len(specs)
        return Load(kv_bytes=kv, flop=2 * per_position * self._context * rows * per_shard)

    def _head(self, batch: int, rows: int) -> Load:
        """The head's part of the vocabulary, for the rows of all data shards."""
        family = self._step.family
        [head] = [spec for spec in family.tensors() if spec.path == family.head_path]
        size = self._local.size(head)
        return Load(weight_bytes=self._local.num_bytes(head, self._step.dtype), flop=2 * size * batch * rows)

    def _slots(self, batch: int) -> int:
        """Of the data shard that has most."""
        return -(-batch // self._step.config.mesh.data)

    @cached_property
    def _products_per_position(self) -> float:
        """Multiplications of one row with one position, in one layer: queries with keys, weights with values."""
        attention = self._step.family.attention
        heads = self._local.parts("heads")
        if isinstance(attention, MlaConfig):
            return attention.num_heads / heads * (2 * attention.kv_rank + attention.rope.num_channels)
        assert isinstance(attention, GqaConfig)
        return attention.num_heads / heads * 2 * attention.head_channels
