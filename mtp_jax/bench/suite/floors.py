"""The fewest bytes a decode step must read: its floor is the time of these at the rate of a device copy.

What is counted: every weight of the layers once, the rows of the head once, keys and values of the context once. A
draft pass of an MTP layer reads that layer and its head again. Of routed experts those that some row is sent to, if
rows choose independently and every expert is as likely as any other: X (1 - (1 - k / X)^T) of X for T rows.
"""

import math
from dataclasses import dataclass

import numpy as np

from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import MTP_ROOT
from mtp_jax.models.decoder import MtpDecoder

_HEAD = {("head",)}
_EMBEDDING = {("embedding",)}


@dataclass(frozen=True)
class LayerBytes:
    """What layers read: `fixed` whatever the rows, and the routed experts of one of `num_moe` expert layers."""

    fixed: int
    expert: int  # one routed expert
    num_moe: int


@dataclass(frozen=True)
class Floor:
    """Bytes of a model's parts. `head_row`: of one token of the vocabulary; `kv_position`: of one layer."""

    target: LayerBytes
    draft: LayerBytes  # the first MTP layer
    head_row: int
    vocab_size: int
    kv_position: int
    num_layers: int
    num_experts: int
    num_active: int

    @classmethod
    def of(cls, family: MtpDecoder, itemsize: int) -> "Floor":
        """From the family's tensors, stored in `itemsize` bytes a number."""
        return cls(
            target=_layer_bytes(family, itemsize, is_draft=False),
            draft=_layer_bytes(family, itemsize, is_draft=True),
            head_row=family.hidden_size * itemsize,
            vocab_size=family.vocab_size,
            kv_position=_kv_channels(family.kv_specs()[0]) * itemsize,
            num_layers=family.num_layers,
            num_experts=0 if family.moe is None else family.moe.num_experts,
            num_active=0 if family.moe is None else family.moe.num_active,
        )

    def plain_bytes(self, batch_size: int, context: float, num_rows: int = 1) -> float:
        """One target pass of `num_rows` rows a sequence over `context` positions each."""
        kv = batch_size * context * self.kv_position * self.num_layers
        return self._weights(self.target, batch_size * num_rows) + self.head_row * self.vocab_size + kv

    def draft_bytes(self, batch_size: int, context: float, head_size: int | None = None) -> float:
        """One draft pass, over a head of `head_size` tokens (None: the whole vocabulary)."""
        head = self.head_row * (self.vocab_size if head_size is None else head_size)
        return self._weights(self.draft, batch_size) + head + batch_size * context * self.kv_position

    def step_bytes(self, batch_size: int, context: float, draft_len: int, head_size: int | None = None) -> float:
        """A speculative step: `draft_len` draft passes, then the target over `draft_len + 1` rows a sequence."""
        target = self.plain_bytes(batch_size, context, draft_len + 1)
        return target + draft_len * self.draft_bytes(batch_size, context, head_size)

    def _weights(self, layers: LayerBytes, num_rows: int) -> float:
        return layers.fixed + layers.num_moe * layers.expert * self.num_experts_read(num_rows)

    def num_experts_read(self, num_rows: int) -> float:
        """Experts of a layer that at least one of so many rows is sent to, on average.

        >>> floor = Floor(LayerBytes(0, 1, 1), LayerBytes(0, 1, 1), 1, 1, 1, 1, num_experts=4, num_active=2)
        >>> floor.num_experts_read(1), floor.num_experts_read(2)
        (2.0, 3.0)
        """
        if self.num_experts == 0:
            return 0.0
        return self.num_experts * (1 - (1 - self.num_active / self.num_experts) ** num_rows)


def _layer_bytes(family: MtpDecoder, itemsize: int, *, is_draft: bool) -> LayerBytes:
    fixed = expert = num_moe = 0
    for spec in family.tensors():
        if spec.path in _EMBEDDING | _HEAD:
            continue
        is_mtp = spec.path[0] == MTP_ROOT
        if is_mtp != is_draft or (is_mtp and spec.path[1] != "0"):
            continue
        size = math.prod(spec.shape) * (np.dtype(spec.dtype).itemsize if spec.dtype else itemsize)
        if spec.axes[0] == "experts":
            expert += size // spec.shape[0]
            num_moe += spec.path[-1] == "down"
        else:
            fixed += size
    return LayerBytes(fixed, expert // max(num_moe, 1), num_moe)


def _kv_channels(spec: KVSpec) -> int:
    return spec.num_kv_heads * (spec.k_channels + (spec.v_channels or 0))
