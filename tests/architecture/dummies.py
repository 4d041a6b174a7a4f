"""One variant of each seam, as small as its contract allows, to show what adding one takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import BACKENDS, Backend
from mtp_jax.core.types import Accepted, Drafts, KVSpec
from mtp_jax.models.api import TensorSpec
from mtp_jax.models.params import get
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.sampling import choose_tokens
from mtp_jax.policies.api import PolicyView

VOCAB_SIZE = 11
ALWAYS = 3
"""The one token that the dummy proposer drafts."""


def next_token(tokens: list[int], shift: int) -> int:
    """What the dummy family says after `tokens`: the sum of all of them and `shift`, modulo the vocabulary."""
    return (sum(tokens) + shift) % VOCAB_SIZE


@dataclass(frozen=True)
class SumFamily:
    """The next token is the sum of all tokens, plus a weight. No MTP layers."""

    name: str = "dummy"
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 1
    num_mtp_layers: int = 0
    chains_mtp_layers: bool = True
    max_position_embeddings: int = 64
    eos_token_ids: tuple[int, ...] = ()

    def kv_specs(self) -> tuple[KVSpec, ...]:
        return (KVSpec(1, 1, 1, None),)

    def draft_kv_specs(self) -> tuple[KVSpec, ...]:
        return ()

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(("shift",), (), (), ("model.shift",), ((),), lambda sources: sources[0], lambda x: (x,)),)

    def duplicates(self) -> Mapping[str, str]:
        return {}

    def ignored_tensors(self) -> tuple[str, ...]:
        return ()

    def init_weights(self, key: Any, dtype: Any) -> dict[str, Any]:
        return {"shift": jnp.ones((), dtype)}

    def forward(
        self, weights: Any, tokens_BW: Any, positions_BW: Any, kv: Any, attend: Any, parallel: Any = None
    ) -> Any:
        values_BWGC = tokens_BW.astype(jnp.float32)[:, :, None, None]
        mean_BWHC, layer_kv = attend(
            kv[0], jnp.zeros_like(values_BWGC), values_BWGC, values_BWGC, scale=1.0, v_channels=1
        )
        num_visible_BW = (positions_BW + 1).astype(jnp.float32)
        return (mean_BWHC[:, :, 0, 0] * num_visible_BW)[:, :, None], (layer_kv,)

    def unembed(self, weights: Any, hidden_BWD: Any, parallel: Any = None) -> Any:
        token = jnp.round(hidden_BWD[..., 0] + get(weights, ("shift",))).astype(jnp.int32) % VOCAB_SIZE
        return jax.nn.one_hot(token, VOCAB_SIZE, dtype=jnp.float32)

    def draft_forward(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("no MTP layers")

    @property
    def head_path(self) -> tuple[str, ...]:
        return ("shift",)

    def draft_unembed(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("no MTP layers")


@dataclass(frozen=True)
class Repeater:
    """Drafts the same token at every position, and keeps nothing."""

    lookahead: int = 0

    def draft_kv_specs(self, family: Any) -> tuple[KVSpec, ...]:
        return ()

    def init_carry(self, family: Any, *, num_slots: int, max_draft_len: int, dtype: Any) -> Any:
        return ()

    def prefill(self, model: Any, carry: Any, draft_kv: Any, chunk: Any) -> Any:
        return carry, draft_kv

    def finish_prefill(self, carry: Any, pending_token_Y: Any, is_last_Y: Any) -> Any:
        return carry

    def propose(self, model: Any, carry: Any, draft_kv: Any, slots: Any, *, draft_len: int) -> Any:
        return Drafts(jnp.full((slots.live.shape[0], draft_len), ALWAYS, jnp.int32)), carry, draft_kv

    def observe(self, carry: Any, hidden_BWD: Any, tokens_BE: Any, num_emitted: Any) -> Any:
        return carry


@dataclass(frozen=True)
class AcceptNothing:
    """Every draft falls; the target's own token follows."""

    takes_trees: bool = False

    def accept(self, drafts: Any, target_logits_BWV: Any, slots: Any, parallel: Any) -> Accepted:
        text = texts_of_rows(slots, drafts)
        tokens_BW = choose_tokens(target_logits_BWV, slots.noise_BWV, slots.sampling, text, parallel)
        return Accepted(jnp.zeros_like(slots.draft_cap), tokens_BW, tokens_BW)


@dataclass(frozen=True)
class UpAndDown:
    """Kmax and 0 drafts in turns."""

    @property
    def is_voted(self) -> bool:
        return False

    def choose(self, view: PolicyView) -> int:
        return view.max_draft_len if view.step_number % 2 == 0 else 0

    def update(self, stats: Any) -> "UpAndDown":
        return self


@dataclass
class CountedBackend:
    """The reference backend, and how often a program that calls it was traced."""

    num_calls: int = 0
    backend: Backend = field(init=False)

    def __post_init__(self) -> None:
        reference = BACKENDS["reference"]

        def run(*arrays: Any, **options: Any) -> jax.Array:
            self.num_calls += 1
            return reference.run(*arrays, **options)

        self.backend = Backend(run, reference.supports, supports_device_lengths=True)


def sum_family(fields: Any, tensor_names: Any) -> SumFamily:
    """As the table of families wants it: reads the fields that it honours."""
    return SumFamily(max_position_embeddings=fields.integer("max_position_embeddings"))


def tensors(shift: int) -> dict[str, np.ndarray]:
    """The dummy family's checkpoint."""
    return {"model.shift": np.array(shift, np.float32)}
