"""What a model family must provide. Everything the engine knows about a model goes through `ModelFamily`.

A family is a frozen, hashable dataclass around its own config; the weights are a plain nested dict of arrays that
travels beside it. Forward functions are pure: weights, tokens and KV in, hidden states and KV out. They never see page
tables or lengths: those are bound into the `attend` callable, which writes the new keys and attends. So the same
forward code serves decode (paged), prefill (paged, wide) and training (dense causal, `layer_kv=None`).

What differs between families is data here, not code in the engine: how many MTP layers, which hidden state is
recycled, which channels a position's KV has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.core.types import KVSpec as KVSpec
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel

Weights = Mapping[str, Any]
"""Nested dict of arrays; leaves are addressed by the key paths of `TensorSpec.path`."""

MTP_ROOT = "mtp_layers"
"""First path entry of the weights that belong to MTP layers."""


@dataclass(frozen=True)
class TensorSpec:
    """One weight array: where it lives in the pytree, and the Hugging Face tensors it is packed from.

    `pack` takes the source arrays in the order of `sources` and returns the array at `path`; `unpack` is its exact
    inverse. `axes` names the logical axis of each dimension (None: replicated): "vocab", "heads", "kv_heads", "ffn",
    "experts". `dtype` None means the dtype the model is loaded in; a name ("float32") pins it.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    pack: Callable[[Sequence[np.ndarray]], np.ndarray]
    unpack: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    dtype: str | None = None


@runtime_checkable
class Attend(Protocol):
    """Writes this call's keys and values, then attends. The engine binds page tables and lengths into it.

    q [B, W, H, C], k [B, W, G, C], v [B, W, G, E] or None (latent: values are the first `v_channels` of k).
    Row w of slot b attends every earlier position of the slot and itself. Returns ([B, W, H, v_channels], layer_kv).
    """

    def __call__(
        self,
        layer_kv: Any,
        q_BWHC: Float[Array, "B W H C"],
        k_BWGC: Float[Array, "B W G C"],
        v_BWGE: Float[Array, "B W G E"] | None,
        *,
        scale: float,
        v_channels: int,
    ) -> tuple[Float[Array, "B W H E"], Any]: ...


@runtime_checkable
class NamedTensors(Protocol):
    """Weights by their checkpoint names: what loading asks of a family, and of a drafter with its own checkpoint."""

    @property
    def name(self) -> str: ...

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every weight. The pytree has exactly these leaves."""
        ...

    def duplicates(self) -> Mapping[str, str]:
        """Checkpoint tensors that are copies of another: {copy name: original name} (embedding and head of MTP layers).

        They may be absent; where present they must equal the original.
        """
        ...

    def ignored_tensors(self) -> tuple[str, ...]:
        """Regular expressions (full match) of checkpoint tensors that are deliberately not used."""
        ...


@runtime_checkable
class ModelFamily(NamedTensors, Protocol):
    """One model architecture with its config. Implementations are frozen, hashable dataclasses."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_mtp_layers(self) -> int: ...
    @property
    def chains_mtp_layers(self) -> bool:
        """Whether an MTP layer takes the hidden state that the layer before it recycled, or again the target's.

        One layer per draft position: DeepSeek-V3 chains them; MiMo-V2's were all trained on the target's hidden state.
        """
        ...

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One per target layer."""
        ...

    def draft_kv_specs(self) -> tuple[KVSpec, ...]:
        """One per MTP layer."""
        ...

    def init_weights(self, key: Array, dtype: Any) -> Weights:
        """Random weights, for tests, benchmarks and training from scratch."""
        ...

    def forward(
        self,
        weights: Weights,
        tokens_BW: Int[Array, "B W"],
        positions_BW: Int[Array, "B W"],
        kv: tuple[Any, ...],
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """Target hidden states after the final norm, and the KV with the new rows in it."""
        ...

    def unembed(
        self, weights: Weights, hidden_BWD: Float[Array, "*x D"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "*x V"]:
        """Float32 logits of `forward`'s hidden states; under tensor parallelism this shard's part of the vocabulary."""
        ...

    def draft_forward(
        self,
        weights: Weights,
        depth: int,
        tokens_BW: Int[Array, "B W"],
        hidden_BWD: Float[Array, "B W D"],
        positions_BW: Int[Array, "B W"],
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], Any]:
        """MTP layer `depth` (0-based). Row at position i takes (hidden state of i, token i+1) and speaks of token i+2.

        `hidden_BWD` is the target's hidden state after its final norm (depth 0), or the previous layer's (where
        `chains_mtp_layers`) or previous recursion's recycled hidden. Returns (hidden for `draft_unembed`, recycled
        hidden, layer_kv): the first is after the head norm; the second is what the next depth or recursion takes, after
        or before that norm as the family was trained (DeepSeek-V3: after; GLM-4.5: before).
        """
        ...

    @property
    def head_path(self) -> tuple[str, ...]:
        """The weight whose rows `draft_unembed` turns into logits, one a token: a draft shortlist has some of them."""
        ...

    def draft_unembed(
        self, weights: Weights, depth: int, hidden_BWD: Float[Array, "*x D"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "*x V"]:
        """Float32 logits of MTP layer `depth` from the first hidden that `draft_forward` returned."""
        ...


@runtime_checkable
class TappedFamily(ModelFamily, Protocol):
    """A family that also hands out the hidden states between its layers, for drafters that are fed with them."""

    @property
    def num_layers(self) -> int: ...

    def embed(
        self, weights: Weights, tokens_BW: Int[Array, "B W"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "B W D"]:
        """The target's embedding of tokens."""
        ...

    def forward_tapped(
        self,
        weights: Weights,
        tokens_BW: Int[Array, "B W"],
        positions_BW: Int[Array, "B W"],
        kv: tuple[Any, ...],
        attend: Attend,
        taps: tuple[int, ...],
        parallel: Parallel = NO_PARALLEL,
    ) -> tuple[Float[Array, "B W D"], tuple[Float[Array, "B W D"], ...], tuple[Any, ...]]:
        """`forward`, with the hidden states that enter layers `taps` between hidden states and KV.

        Layer 0's are the embedding; those that enter layer `num_layers`, which is not there, are the last layer's
        output before the final norm.
        """
        ...
