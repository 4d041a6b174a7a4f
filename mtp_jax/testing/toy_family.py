"""An integer model: exact, fast, and quick to notice a wrong page, a missing drafter entry or a stale length.

Each position stores a hash of (token, position). Attention with zero queries is a plain mean over the visible
positions; times their number, rounded, it is the exact integer sum S. Next-token logits are an integer function of S,
so a single wrong, missing or extra position changes what comes out, and nothing depends on rounding.

The MTP layers predict exactly the target's logits, and then spoil them in a share of the cases set by the test. They
do so only if their own cache adds up: a hole in the drafter's KV shows as a fall in acceptance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.models.api import Attend, KVSpec, TensorSpec, Weights
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel

_PRIME = 31  # hashes are residues modulo this prime; token ids must be below it
_TOKEN_FACTORS = np.array([3, 5, 7, 11], np.int32)
_POSITION_FACTORS = np.array([13, 17, 19, 23], np.int32)
_INVERSES = np.array([pow(int(a), -1, _PRIME) for a in _TOKEN_FACTORS], np.int32)
_NUM_CHANNELS = len(_TOKEN_FACTORS)
_STATE_FACTORS = np.array([1, 7, 29, 53], np.int32)
_NUM_STATES = 997


@dataclass(frozen=True)
class ToyFamily:
    """`draft_hit_percent`: share of states in which the MTP layers speak the target's own logits.

    `draft_flatness` above 1 divides the MTP layers' logits: the same order of tokens, a flatter law.
    `latent` stores values as leading channels of the keys (as MLA does); else keys and values apart (as GQA does).
    """

    vocab_size: int = 29
    num_layers: int = 1
    num_mtp_layers: int = 1
    draft_hit_percent: int = 70
    draft_flatness: float = 1.0
    latent: bool = False
    chains_mtp_layers: bool = True
    max_position_embeddings: int = 4096
    eos_token_ids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "toy"

    @property
    def hidden_size(self) -> int:
        return _NUM_CHANNELS + 1

    def _kv_spec(self) -> KVSpec:
        return KVSpec(1, _NUM_CHANNELS, None if self.latent else _NUM_CHANNELS, None)

    def kv_specs(self) -> tuple[KVSpec, ...]:
        return (self._kv_spec(),) * self.num_layers

    def draft_kv_specs(self) -> tuple[KVSpec, ...]:
        return (self._kv_spec(),) * self.num_mtp_layers

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec(
                ("salt",), (), (), ("salt",), ((),), lambda sources: sources[0], lambda array: (array,), dtype="int32"
            ),
            TensorSpec(
                ("head",),
                (self.vocab_size,),
                (None,),
                ("head",),
                ((self.vocab_size,),),
                lambda sources: sources[0],
                lambda array: (array,),
                dtype="int32",
            ),
        )

    def duplicates(self) -> Mapping[str, str]:
        return {}

    def ignored_tensors(self) -> tuple[str, ...]:
        return ()

    def init_weights(self, key: Array, dtype: Any) -> Weights:  # noqa: ARG002
        return {"salt": jnp.int32(5), "head": jnp.arange(self.vocab_size, dtype=jnp.int32)}

    def _attended_sum(
        self, layer_kv: Any, hash_BWC: Int[Array, "B W C"], positions_BW: Int[Array, "B W"], attend: Attend
    ) -> tuple[Int[Array, "B W C"], Any]:
        values_BWGC = hash_BWC[:, :, None, :].astype(jnp.float32)
        mean_BWHC, layer_kv = attend(
            layer_kv,
            jnp.zeros_like(values_BWGC),
            values_BWGC,
            None if self.latent else values_BWGC,
            scale=1.0,
            v_channels=_NUM_CHANNELS,
        )
        num_visible = (positions_BW + 1).astype(jnp.float32)[..., None]
        return jnp.round(mean_BWHC[:, :, 0, :] * num_visible).astype(jnp.int32), layer_kv

    def forward(
        self,
        weights: Weights,  # noqa: ARG002
        tokens_BW: Int[Array, "B W"],
        positions_BW: Int[Array, "B W"],
        kv: tuple[Any, ...],
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,  # noqa: ARG002
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        hash_BWC = position_hash(tokens_BW, positions_BW)
        sums, new_kv = [], []
        for layer_kv in kv:
            sum_BWC, layer_kv = self._attended_sum(layer_kv, hash_BWC, positions_BW, attend)
            sums.append(sum_BWC)
            new_kv.append(layer_kv)
        # Layers agree on a sound cache; where one does not, the result is spoiled and the test sees it.
        is_sound = jnp.all(jnp.stack([jnp.all(s == sums[0], axis=-1) for s in sums]), axis=0)
        return _hidden(sums[0], is_sound), tuple(new_kv)

    def unembed(
        self,
        weights: Weights,
        hidden_BWD: Float[Array, "*x D"],
        parallel: Parallel = NO_PARALLEL,
    ) -> Float[Array, "*x V"]:
        sum_xC, is_sound_x = _parts(hidden_BWD)
        state_x = _state(sum_xC, weights["salt"]) + jnp.where(is_sound_x, 0, 1)
        return parallel.own_vocab(_logits(state_x, weights["head"]))

    def draft_forward(
        self,
        weights: Weights,  # noqa: ARG002
        depth: int,
        tokens_BW: Int[Array, "B W"],
        hidden_BWD: Float[Array, "B W D"],
        positions_BW: Int[Array, "B W"],
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,  # noqa: ARG002
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], Any]:
        sum_in_BWC, _ = _parts(hidden_BWD)
        hash_BWC = position_hash(tokens_BW, positions_BW + 1 + depth)
        sum_BWC = sum_in_BWC + hash_BWC
        cached_BWC, layer_kv = self._attended_sum(layer_kv, hash_BWC, positions_BW, attend)
        hidden = _hidden(sum_BWC, _is_sum_of_first_hashes(sum_BWC - cached_BWC, depth + 1))
        return hidden, hidden, layer_kv

    @property
    def head_path(self) -> tuple[str, ...]:
        return ("head",)

    def draft_unembed(
        self,
        weights: Weights,
        depth: int,  # noqa: ARG002
        hidden_BWD: Float[Array, "*x D"],
        parallel: Parallel = NO_PARALLEL,
    ) -> Float[Array, "*x V"]:
        sum_xC, is_whole_x = _parts(hidden_BWD)
        state_x = _state(sum_xC, weights["salt"])
        is_hit_x = is_whole_x & ((state_x * 37 + 11) % 100 < self.draft_hit_percent)
        ids_N = weights["head"]
        spoiled_xN = _logits(state_x, (ids_N - 1) % self.vocab_size)
        logits_xN = jnp.where(is_hit_x[..., None], _logits(state_x, ids_N), spoiled_xN)
        return parallel.own_vocab(logits_xN / self.draft_flatness)

    def plain_logits(self, tokens: Sequence[int], salt: int = 5) -> Float[np.ndarray, " V"]:
        """Next-token logits after `tokens`, by the definition and without any engine: the oracle of the laws."""
        return _logit_64ths(self._plain_state(tokens, salt), np.arange(self.vocab_size)).astype(np.float32) / 64

    def plain_draft_logits(self, tokens: Sequence[int], salt: int = 5) -> Float[np.ndarray, " V"]:
        """What MTP layers with whole caches say of the token after `tokens`: the target's logits, or those spoiled."""
        logits_V = self.plain_logits(tokens, salt) / np.float32(self.draft_flatness)
        return logits_V if self.plain_is_hit(tokens, salt) else np.roll(logits_V, 1)

    def plain_is_hit(self, tokens: Sequence[int], salt: int = 5) -> bool:
        """Whether they speak the target's own: so a test can look for a text with the acceptance it wants."""
        return (self._plain_state(tokens, salt) * 37 + 11) % 100 < self.draft_hit_percent

    def _plain_state(self, tokens: Sequence[int], salt: int) -> int:
        token_S1, position_S1 = np.asarray(tokens)[:, None] + 1, np.arange(1, len(tokens) + 1)[:, None]
        sums_C = ((token_S1 * _TOKEN_FACTORS + position_S1 * _POSITION_FACTORS) % _PRIME).sum(axis=0)
        return (int((sums_C * _STATE_FACTORS).sum()) + salt) % _NUM_STATES


def position_hash(tokens_BW: Int[Array, "B W"], positions_BW: Int[Array, "B W"]) -> Int[Array, "B W C"]:
    """What a position stores: residues of a linear function of token and position."""
    tokens_BW1, positions_BW1 = tokens_BW[..., None] + 1, positions_BW[..., None] + 1
    return (tokens_BW1 * _TOKEN_FACTORS[None, None, :] + positions_BW1 * _POSITION_FACTORS[None, None, :]) % _PRIME


def _is_sum_of_first_hashes(rest_BWC: Int[Array, "B W C"], count: int) -> Array:
    """Whether what a drafter's cache lacks is exactly the hashes of the first `count` positions.

    Channel c of that sum is a_c T + b_c Q modulo the prime, with Q = 1 + ... + count known and T the same everywhere.
    """
    total_position = count * (count + 1) // 2
    position_sum_11C = (_POSITION_FACTORS * total_position)[None, None, :]
    token_sum_BWC = ((rest_BWC - position_sum_11C) * _INVERSES[None, None, :]) % _PRIME
    in_range = (rest_BWC >= 0) & (rest_BWC < count * _PRIME)
    return jnp.all((token_sum_BWC == token_sum_BWC[..., :1]) & in_range, axis=-1)


def _hidden(sum_BWC: Int[Array, "B W C"], is_sound_BW: Array) -> Float[Array, "B W D"]:
    return jnp.concatenate([sum_BWC, is_sound_BW[..., None].astype(jnp.int32)], axis=-1).astype(jnp.float32)


def _parts(hidden_BWD: Float[Array, "*x D"]) -> tuple[Int[Array, "*x C"], Array]:
    return hidden_BWD[..., :_NUM_CHANNELS].astype(jnp.int32), hidden_BWD[..., _NUM_CHANNELS] == 1.0


def _state(sum_xC: Int[Array, "*x C"], salt: Int[Array, ""]) -> Int[Array, "*x"]:
    weighted_xC = sum_xC * jnp.expand_dims(_STATE_FACTORS, range(sum_xC.ndim - 1))
    return (jnp.sum(weighted_xC, axis=-1) + salt) % _NUM_STATES


def _logits(state_x: Int[Array, "*x"], ids_N: Int[Array, " N"]) -> Float[Array, "*x N"]:
    """The head's part of the model: a logit for each of these tokens."""
    logits_64 = _logit_64ths(state_x[..., None], jnp.expand_dims(ids_N, range(state_x.ndim)))
    return logits_64.astype(jnp.float32) / 64


def _logit_64ths(state: Any, token: Any) -> Any:
    """A logit between 0 and 8, in steps of 1/64: few ties, and a law that is spread at temperature 1."""
    return (state * (token * 7 + 3) + token * token * 5) % 521
