"""Eagle3 drafters (Li et al., arXiv 2503.01840) in the layout in which they are published.

A drafter is a single layer with a checkpoint of its own. It is fed with hidden states of several target layers, joined
and projected by `fc` (the *features* of a position), and with the embedding of the next token:

    y = x + attention([input_layernorm(embedding); hidden_norm(x)]),   z = y + mlp(post_attention_layernorm(y))

where x is a position's features or, while drafting on, the z of the position before. `norm` and `lm_head` turn z into
logits over the drafter's own vocabulary; column n is the target's token n + d2t[n].
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import Attend, TappedFamily, TensorSpec, Weights
from mtp_jax.models.gqa import GqaConfig
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.layers import RmsNorm
from mtp_jax.models.linear import Mlp
from mtp_jax.models.llama import LLAMA, read_gqa, refuse_window
from mtp_jax.models.params import ModuleTree, param, same
from mtp_jax.models.rope import Rotation
from mtp_jax.ops.sharding import Parallel, take_embedding

TOKEN_MAP = "d2t"
"""int [N]: what to add to a draft id to get the target's id."""
TOKEN_MASK = "t2d"
"""bool [V]: which of the target's tokens the drafter has. Says the same as `d2t` again, and must."""
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Eagle3Drafter:
    """A drafter's config.

    `taps`: the target layers whose input it is fed with; the number of layers stands for the last one's output.
    `has_embedding`: it brings its own instead of sharing the target's. `has_token_map`: its vocabulary is not the
    target's. `norm_before_residual`: x in the equation above is `hidden_norm(x)` in both places.
    """

    target_hidden_size: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    ffn_size: int
    attention: GqaConfig
    rms_norm_eps: float
    taps: tuple[int, ...]
    norm_before_residual: bool
    has_embedding: bool
    has_token_map: bool
    initializer_range: float

    @property
    def name(self) -> str:
        """What errors call it."""
        return "eagle3"

    @cached_property
    def _tree(self) -> ModuleTree:
        return ModuleTree(Eagle3Module(self))

    def kv_spec(self) -> KVSpec:
        """Of its one layer."""
        return self.attention.kv_spec()

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every weight."""
        return self._tree.tensors()

    def duplicates(self) -> Mapping[str, str]:
        """None."""
        return {}

    def ignored_tensors(self) -> tuple[str, ...]:
        """The mask is only compared with the map."""
        return (TOKEN_MASK,)

    def init_weights(self, key: Array, dtype: Any) -> Weights:
        """Random matrices; draft ids are the target's first ones."""
        return self._tree.init_weights(key, dtype, self.initializer_range)

    def bind(self, weights: Weights) -> "Eagle3Module":
        """The `nnx` module with these weights."""
        module = self._tree.bind(weights)
        assert isinstance(module, Eagle3Module)
        return module

    def features(self, weights: Weights, tapped: tuple[Float[Array, "B W T"], ...]) -> Float[Array, "B W D"]:
        """What a position's tapped hidden states are to the drafter."""
        joined = jnp.concatenate(tapped, axis=-1)
        return jnp.einsum("bwe,ed->bwd", joined, self.bind(weights).fc[...])

    def embed(self, weights: Weights, tokens_BW: Int[Array, "B W"], parallel: Parallel) -> Float[Array, "B W D"]:
        """The drafter's own embedding of target tokens, where it has one."""
        table = self.bind(weights).embedding
        assert table is not None
        return take_embedding(table[...], tokens_BW, parallel)

    def forward(
        self,
        weights: Weights,
        embedded_BWD: Float[Array, "B W D"],
        hidden_BWD: Float[Array, "B W D"],
        positions_BW: Int[Array, "B W"],
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel,
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], Any]:
        """(hidden for `unembed`, hidden to recycle, layer_kv): the first after the drafter's norm, the second not."""
        module = self.bind(weights)
        rotation = self.attention.rope.rotation(positions_BW)
        x_BWD, layer_kv = module.layer(embedded_BWD, hidden_BWD, rotation, layer_kv, attend, parallel)
        return module.norm(x_BWD), x_BWD, layer_kv

    def unembed(self, weights: Weights, hidden_BWD: Float[Array, "*x D"]) -> Float[Array, "*x N"]:
        """Float32 logits of draft ids; under tensor parallelism this shard's part of them."""
        table_ND = self.bind(weights).head[...]
        return jnp.einsum("...d,nd->...n", hidden_BWD, table_ND, preferred_element_type=jnp.float32)

    def token_ids(self, weights: Weights) -> Int[Array, " N"] | None:
        """The target's id of each draft id; None where they are the same."""
        offsets = self.bind(weights).token_map
        return None if offsets is None else jnp.arange(self.draft_vocab_size, dtype=jnp.int32) + offsets[...]


class Eagle3Module(nnx.Module):
    """A drafter's parameters. The head is split over the whole mesh by draft ids, the layer as a target layer is."""

    def __init__(self, drafter: Eagle3Drafter):
        size, num_inputs = drafter.hidden_size, len(drafter.taps) * drafter.target_hidden_size
        self.fc = param(same("fc.weight", size, num_inputs).transpose(1, 0), (None, None))
        table = same(EMBEDDING, drafter.vocab_size, size)
        self.embedding = param(table, ("vocab", None)) if drafter.has_embedding else None
        self.layer = Eagle3Layer(drafter)
        self.norm = RmsNorm(size, drafter.rms_norm_eps, "norm.weight")
        self.head = param(same("lm_head.weight", drafter.draft_vocab_size, size), ("vocab", None))
        token_map = same(TOKEN_MAP, drafter.draft_vocab_size)
        self.token_map = param(token_map, (None,), fill=0.0, dtype="int32") if drafter.has_token_map else None


class Eagle3Layer(nnx.Module):
    """The drafter's layer: see the module."""

    def __init__(self, drafter: Eagle3Drafter):
        size, eps = drafter.hidden_size, drafter.rms_norm_eps
        self.norm_before_residual = drafter.norm_before_residual
        self.embedding_norm = RmsNorm(size, eps, "midlayer.input_layernorm.weight")
        self.hidden_norm = RmsNorm(size, eps, "midlayer.hidden_norm.weight")
        self.attention = drafter.attention.build(size, "midlayer.self_attn", input_size=2 * size)
        self.ffn_norm = RmsNorm(size, eps, "midlayer.post_attention_layernorm.weight")
        self.ffn = Mlp(size, drafter.ffn_size, "midlayer.mlp")

    def __call__(
        self,
        embedded_BWD: Array,
        hidden_BWD: Array,
        rotation: Rotation,
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel,
    ) -> tuple[Array, Any]:
        normed_BWD = self.hidden_norm(hidden_BWD)
        pair = jnp.concatenate([self.embedding_norm(embedded_BWD), normed_BWD], axis=-1)
        attended_BWD, layer_kv = self.attention(pair, rotation, layer_kv, attend, parallel)
        x_BWD = (normed_BWD if self.norm_before_residual else hidden_BWD) + attended_BWD
        return x_BWD + self.ffn(self.ffn_norm(x_BWD), parallel), layer_kv


def eagle3_drafter(fields: Mapping[str, Any], tensor_names: Collection[str], target: TappedFamily) -> Eagle3Drafter:
    """The drafter that a published `config.json` describes, for this target. `ConfigError` where the two do not fit.

    Without `draft_vocab_size` its vocabulary is the target's.
    """
    config = HfConfig(fields)
    config.choice("hidden_act", "silu")
    config.ignore("model_type", "max_position_embeddings", "eos_token_id")
    refuse_window(config)
    num_layers = config.integer("num_hidden_layers", 1)
    if num_layers != 1:
        raise ConfigError(f"the drafter's config field 'num_hidden_layers' is {num_layers}; Eagle3 drafters have 1.")
    if config.flag("tie_word_embeddings", False):
        raise ConfigError("the drafter's config field 'tie_word_embeddings' is true; its head must be its own: false.")
    hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
    target_hidden_size = config.integer("target_hidden_size", hidden_size)
    has_embedding = EMBEDDING in tensor_names
    named = "target_hidden_size" if config.get("target_hidden_size") is not None else "hidden_size"
    _require_equal(named, target_hidden_size, target.hidden_size, f"the {target.name} target's hidden size")
    _require_equal("vocab_size", vocab_size, target.vocab_size, f"the {target.name} target's vocabulary")
    if not has_embedding:
        what = f"the {target.name} target's hidden size, as the checkpoint has no {EMBEDDING!r} of its own"
        _require_equal("hidden_size", hidden_size, target.hidden_size, what)
    draft_vocab_size = config.integer("draft_vocab_size", vocab_size)
    if draft_vocab_size > vocab_size:
        raise ConfigError(
            f"the drafter's config field 'draft_vocab_size' is {draft_vocab_size}; "
            f"it must be at most vocab_size={vocab_size}."
        )
    attention = read_gqa(LLAMA, config)
    drafter = Eagle3Drafter(
        target_hidden_size=target_hidden_size,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        ffn_size=config.integer("intermediate_size"),
        attention=attention,
        rms_norm_eps=attention.rms_norm_eps,
        taps=_read_taps(config, target.num_layers),
        norm_before_residual=config.flag("norm_before_residual", False),
        has_embedding=has_embedding,
        has_token_map=draft_vocab_size < vocab_size or TOKEN_MAP in tensor_names,
        initializer_range=config.positive("initializer_range", 0.02),
    )
    config.refuse_unknown()
    return drafter


def _require_equal(name: str, value: int, wanted: int, what: str) -> None:
    if value != wanted:
        raise ConfigError(f"the drafter's config field {name!r} is {value}; it must be {wanted}, {what}.")


_TAPS = "eagle_aux_hidden_state_layer_ids"


def _read_taps(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """The inputs of layers 2, n // 2 and n - 3 of n, unless the config lists others.

    Lists are written in two ways: by the layer whose input is meant, or by the layer whose output is. Lists of the
    second kind start with 1, the output of the second layer; the first state that anybody feeds is that one.
    """
    nested = config.get("eagle_config", {})
    if not isinstance(nested, Mapping) or nested.get("use_aux_hidden_state", True) is not True:
        raise ConfigError(
            f"the drafter's config field 'eagle_config' is {nested!r}; an Eagle3 drafter is fed with target layers, so "
            "it must be a mapping that does not switch use_aux_hidden_state off."
        )
    above, among = config.get(_TAPS), nested.get(_TAPS)
    if above and among and above != among:
        raise ConfigError(f"the drafter's config field {_TAPS!r} is {above}, and {among} in 'eagle_config'; give one.")
    listed = above or among
    if not listed:
        taps = (2, num_layers // 2, num_layers - 3)
        if not taps[0] < taps[1] < taps[2]:
            raise ConfigError(
                f"the target has {num_layers} layers, too few for the usual low, middle and high one (7 are needed); "
                f"the drafter's config must list them as {_TAPS!r}."
            )
        return taps
    if not isinstance(listed, list | tuple) or not all(type(layer) is int for layer in listed):
        raise ConfigError(f"the drafter's config field {_TAPS!r} is {listed!r}; it must be a list of layers.")
    taps = tuple(layer + 1 for layer in listed) if listed[0] == 1 else tuple(listed)
    if not all(low < high for low, high in pairwise((-1, *taps, num_layers + 1))):
        raise ConfigError(
            f"the drafter's config field {_TAPS!r} is {list(listed)}; it must ascend within the target's {num_layers} "
            "layers."
        )
    return taps
