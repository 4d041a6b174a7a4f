"""A target and a drafter with a checkpoint of its own, joined into one family: what the engine serves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float, Int

from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import Attend, TappedFamily, TensorSpec, Weights
from mtp_jax.models.eagle3 import Eagle3Drafter
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel

DRAFTER = "drafter"
"""Where the drafter's weights are beside the target's: a name that no target has."""


@dataclass(frozen=True)
class WithDrafter:
    """The `target`, drafted for by `drafter`. A `ModelFamily` whose one draft layer is the drafter's.

    The target's own MTP layers, if it has any, are not drafted with: `num_mtp_layers` is 0.
    """

    target: TappedFamily
    drafter: Eagle3Drafter
    num_mtp_layers: int = 0
    chains_mtp_layers: bool = True

    @property
    def name(self) -> str:
        """The target's."""
        return self.target.name

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.target.vocab_size

    @property
    def hidden_size(self) -> int:
        """The target's."""
        return self.target.hidden_size

    @property
    def max_position_embeddings(self) -> int:
        """The target's: rotary angles are computed, so the drafter has no longest text of its own."""
        return self.target.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The target's."""
        return self.target.eos_token_ids

    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One per target layer."""
        return self.target.kv_specs()

    def draft_kv_specs(self) -> tuple[KVSpec, ...]:
        """The drafter's layer."""
        return (self.drafter.kv_spec(),)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The target's weights and, under `DRAFTER`, the drafter's; their checkpoint names get that prefix too."""
        return (*self.target.tensors(), *map(_of_drafter, self.drafter.tensors()))

    def duplicates(self) -> Mapping[str, str]:
        """The target's."""
        return self.target.duplicates()

    def ignored_tensors(self) -> tuple[str, ...]:
        """The target's."""
        return self.target.ignored_tensors()

    def init_weights(self, key: Array, dtype: Any) -> Weights:
        """Random weights of both."""
        return self.join(self.target.init_weights(key, dtype), self.drafter.init_weights(key, dtype))

    def join(self, target: Weights, drafter: Weights) -> Weights:
        """One pytree of the weights of both."""
        return {**target, DRAFTER: drafter}

    def forward(
        self,
        weights: Weights,
        tokens_BW: Int[Array, "B W"],
        positions_BW: Int[Array, "B W"],
        kv: tuple[Any, ...],
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """The target's."""
        return self.target.forward(weights, tokens_BW, positions_BW, kv, attend, parallel)

    def forward_with_features(
        self,
        weights: Weights,
        tokens_BW: Int[Array, "B W"],
        positions_BW: Int[Array, "B W"],
        kv: tuple[Any, ...],
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W J"], tuple[Any, ...]]:
        """`forward`, with what the drafter is fed of each row between hidden states and KV."""
        hidden_BWD, tapped, kv = self.target.forward_tapped(
            weights, tokens_BW, positions_BW, kv, attend, self.drafter.taps, parallel
        )
        return hidden_BWD, self.drafter.features(weights[DRAFTER], tapped), kv

    def unembed(
        self, weights: Weights, hidden_BWD: Float[Array, "*x D"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "*x V"]:
        """The target's."""
        return self.target.unembed(weights, hidden_BWD, parallel)

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
        """The drafter over pairs of (features or recycled hidden, next token): see `ModelFamily.draft_forward`."""
        del depth  # there is one layer
        own = weights[DRAFTER]
        if self.drafter.has_embedding:
            embedded_BWD = self.drafter.embed(own, tokens_BW, parallel)
        else:
            embedded_BWD = self.target.embed(weights, tokens_BW, parallel)
        return self.drafter.forward(own, embedded_BWD, hidden_BWD, positions_BW, layer_kv, attend, parallel)

    @property
    def head_path(self) -> tuple[str, ...]:
        """The drafter's own head."""
        return (DRAFTER, "head")

    def draft_unembed(
        self, weights: Weights, depth: int, hidden_BWD: Float[Array, "*x D"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "*x N"]:
        """Logits over the drafter's vocabulary, whose columns `draft_ids` names."""
        del depth, parallel  # each shard has its own rows of the head
        return self.drafter.unembed(weights[DRAFTER], hidden_BWD)

    def draft_ids(self, weights: Weights) -> Int[Array, " N"] | None:
        """The target's token of each column of `draft_unembed`; None where they are the same."""
        return self.drafter.token_ids(weights[DRAFTER])


def _of_drafter(spec: TensorSpec) -> TensorSpec:
    return replace(spec, path=(DRAFTER, *spec.path), sources=tuple(f"{DRAFTER}.{name}" for name in spec.sources))
