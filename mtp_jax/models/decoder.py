"""A pre-norm decoder with or without MTP layers: what all families share. They differ in attention and in data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mtp_jax.core.types import KVSpec
from mtp_jax.models.api import Attend, TensorSpec, Weights
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.layers import RmsNorm
from mtp_jax.models.linear import XLA, Mlp, linear, logits
from mtp_jax.models.moe import Moe, MoeConfig
from mtp_jax.models.mtp_layout import MtpLayout, num_mtp_layers
from mtp_jax.models.params import ModuleTree, param, same
from mtp_jax.models.rope import Rope, Rotation
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel, take_embedding


@runtime_checkable
class AttentionModule(Protocol):
    """Attention with its projections, of [norm of] x; the sum over the `model` axis, added to the residual."""

    def __call__(
        self,
        x_BWD: Array,
        rotation: Rotation,
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel,
        norm: RmsNorm | None = None,
        residual_BWD: Array | None = None,
    ) -> tuple[Array, Any]: ...


@runtime_checkable
class AttentionConfig(Protocol):
    """One attention variant: frozen and hashable."""

    @property
    def rope(self) -> Rope: ...

    def kv_spec(self) -> KVSpec: ...

    def build(self, hidden_size: int, name: str, *, linear_backend: str) -> AttentionModule: ...


@dataclass(frozen=True)
class MtpDecoder:
    """A `ModelFamily` of this shape. Built by a family's `from_config`, which reads the fields of its `config.json`."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_mtp_layers: int
    ffn_size: int
    moe: MoeConfig | None
    moe_layers: tuple[bool, ...]  # one entry per layer, MTP layers last
    attention: AttentionConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    mtp: MtpLayout
    recycle_after_head_norm: bool
    chains_mtp_layers: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    initializer_range: float
    linear_backend: str = field(default=XLA, kw_only=True)

    @cached_property
    def _tree(self) -> ModuleTree:
        return ModuleTree(DecoderModule(self))

    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One per target layer."""
        return (self.attention.kv_spec(),) * self.num_layers

    def draft_kv_specs(self) -> tuple[KVSpec, ...]:
        """One per MTP layer."""
        return (self.attention.kv_spec(),) * self.num_mtp_layers

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every weight, MTP layers included."""
        return self._tree.tensors()

    def duplicates(self) -> Mapping[str, str]:
        """Embedding and head that a checkpoint repeats in its MTP layers, and the head of tied embeddings."""
        head = EMBEDDING_NAME if self.tie_word_embeddings else HEAD_NAME
        copies = {HEAD_NAME: EMBEDDING_NAME} if self.tie_word_embeddings else {}
        for depth in range(self.num_mtp_layers if self.mtp.has_copies else 0):
            prefix = self.mtp.prefix(self.num_layers, depth)
            copies[f"{prefix}.embed_tokens.weight"] = EMBEDDING_NAME
            copies[f"{prefix}.shared_head.head.weight"] = head
        return copies

    def ignored_tensors(self) -> tuple[str, ...]:
        """Frequency tables that old checkpoints carry; they are computed here."""
        return (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def init_weights(self, key: Array, dtype: Any) -> Weights:
        """Normal random matrices of the config's `initializer_range`, ones for norms, zeros for biases."""
        return self._tree.init_weights(key, dtype, self.initializer_range)

    def bind(self, weights: Weights) -> "DecoderModule":
        """The `nnx` module with these weights: `family.bind(weights).layers[3].attention`."""
        module = self._tree.bind(weights)
        assert isinstance(module, DecoderModule)
        return module

    def forward(
        self,
        weights: Weights,
        tokens_BW: Int[Array, "B W"],
        positions_BW: Int[Array, "B W"],
        kv: tuple[Any, ...],
        attend: Attend,
        parallel: Parallel = NO_PARALLEL,
    ) -> tuple[Float[Array, "B W D"], tuple[Any, ...]]:
        """See `ModelFamily.forward`."""
        hidden_BWD, _, new_kv = self.forward_tapped(weights, tokens_BW, positions_BW, kv, attend, (), parallel)
        return hidden_BWD, new_kv

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
        """See `TappedFamily.forward_tapped`."""
        module = self.bind(weights)
        rotation = self.attention.rope.rotation(positions_BW)
        x_BWD = take_embedding(module.embedding[...], tokens_BW, parallel)
        entering, new_kv = [x_BWD], []
        for layer, layer_kv in zip(module.layers, kv, strict=True):
            x_BWD, layer_kv = layer(x_BWD, rotation, layer_kv, attend, parallel)
            entering.append(x_BWD)
            new_kv.append(layer_kv)
        return module.norm(x_BWD), tuple(entering[layer] for layer in taps), tuple(new_kv)

    def embed(
        self, weights: Weights, tokens_BW: Int[Array, "B W"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "B W D"]:
        """See `TappedFamily.embed`."""
        return take_embedding(self.bind(weights).embedding[...], tokens_BW, parallel)

    def unembed(
        self, weights: Weights, hidden_BWD: Float[Array, "*x D"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "*x V"]:
        """See `ModelFamily.unembed`."""
        del parallel  # each shard has its own rows of the table
        module = self.bind(weights)
        table_VD = (module.embedding if module.head is None else module.head)[...]
        return logits(hidden_BWD, table_VD, self.linear_backend)

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
        """See `ModelFamily.draft_forward`."""
        module = self.bind(weights)
        mtp = module.mtp_layers[depth]
        rotation = self.attention.rope.rotation(positions_BW)
        embedded_BWD = take_embedding(module.embedding[...], tokens_BW, parallel)
        x_BWD, layer_kv = mtp(embedded_BWD, hidden_BWD, rotation, layer_kv, attend, parallel)
        head_BWD = mtp.head_norm(x_BWD)
        return head_BWD, head_BWD if self.recycle_after_head_norm else x_BWD, layer_kv

    @property
    def head_path(self) -> tuple[str, ...]:
        """See `ModelFamily.head_path`."""
        return ("embedding",) if self.tie_word_embeddings else ("head",)

    def draft_unembed(
        self, weights: Weights, depth: int, hidden_BWD: Float[Array, "*x D"], parallel: Parallel = NO_PARALLEL
    ) -> Float[Array, "*x V"]:
        """See `ModelFamily.draft_unembed`. The head is the target's."""
        del depth
        return self.unembed(weights, hidden_BWD, parallel)


EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


class DecoderModule(nnx.Module):
    """Embedding, layers, final norm, head, MTP layers."""

    def __init__(self, family: MtpDecoder):
        table = (family.vocab_size, family.hidden_size)
        self.embedding = param(same(EMBEDDING_NAME, *table), ("vocab", None))
        layers = [DecoderLayer(family, index, f"model.layers.{index}") for index in range(family.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = RmsNorm(family.hidden_size, family.rms_norm_eps, "model.norm.weight")
        tied = family.tie_word_embeddings
        self.head = None if tied else param(same(HEAD_NAME, *table), ("vocab", None))
        self.mtp_layers = nnx.List([MtpLayer(family, depth) for depth in range(family.num_mtp_layers)])


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    `index` counts MTP layers after the target's; checkpoint tensors start with `name`.
    """

    def __init__(self, family: MtpDecoder, index: int, name: str):
        size, eps = family.hidden_size, family.rms_norm_eps
        self.attention_norm = RmsNorm(size, eps, f"{name}.input_layernorm.weight")
        self.attention = family.attention.build(size, f"{name}.self_attn", linear_backend=family.linear_backend)
        self.ffn_norm = RmsNorm(size, eps, f"{name}.post_attention_layernorm.weight")
        if family.moe is not None and family.moe_layers[index]:
            self.ffn = Moe(size, family.moe, f"{name}.mlp", family.linear_backend)
        else:
            self.ffn = Mlp(size, family.ffn_size, f"{name}.mlp", family.linear_backend)

    def __call__(
        self, x_BWD: Array, rotation: Rotation, layer_kv: Any, attend: Attend, parallel: Parallel
    ) -> tuple[Array, Any]:
        x_BWD, layer_kv = self.attention(x_BWD, rotation, layer_kv, attend, parallel, self.attention_norm, x_BWD)
        return self.ffn(x_BWD, parallel, self.ffn_norm, x_BWD), layer_kv


class MtpLayer(nnx.Module):
    """block(join([norm(embedding); norm(hidden)])), the two in the layout's order; `head_norm` goes before the head."""

    def __init__(self, family: MtpDecoder, depth: int):
        layout = family.mtp
        name = layout.prefix(family.num_layers, depth)
        size, eps = family.hidden_size, family.rms_norm_eps
        self.hidden_first = layout.hidden_first
        self.linear_backend = family.linear_backend
        self.embedding_norm = RmsNorm(size, eps, f"{name}.{layout.embedding_norm}.weight")
        self.hidden_norm = RmsNorm(size, eps, f"{name}.{layout.hidden_norm}.weight")
        self.join = param(same(f"{name}.{layout.join}.weight", size, 2 * size).transpose(1, 0), (None, None))
        self.layer = DecoderLayer(family, family.num_layers + depth, name)
        self.head_norm = RmsNorm(size, eps, f"{name}.{layout.head_norm}.weight")

    def __call__(
        self,
        embedded_BWD: Array,
        hidden_BWD: Array,
        rotation: Rotation,
        layer_kv: Any,
        attend: Attend,
        parallel: Parallel,
    ) -> tuple[Array, Any]:
        pair = (self.embedding_norm(embedded_BWD), self.hidden_norm(hidden_BWD))
        joined = jnp.concatenate(pair[::-1] if self.hidden_first else pair, axis=-1)
        x_BWD = linear(joined, self.join[...], self.linear_backend)
        return self.layer(x_BWD, rotation, layer_kv, attend, parallel)


def read_decoder(
    config: HfConfig,
    tensor_names: Collection[str] | None,
    *,
    name: str,
    attention: AttentionConfig,
    rms_norm_eps: float,
    mtp: MtpLayout,
    recycle_after_head_norm: bool,
    moe: MoeConfig | None = None,
    num_dense_layers: int | None = None,
) -> MtpDecoder:
    """The decoder of a config. `num_dense_layers` and `rms_norm_eps` stand in for absent fields.

    Layers from `first_k_dense_replace` on whose index `moe_layer_freq` divides have experts; MTP layers too, unless the
    checkpoint's own tensors say otherwise. `num_dense_layers` None: a family whose configs know no experts.
    """
    config.choice("hidden_act", "silu")
    num_layers = config.integer("num_hidden_layers")
    num_mtp = num_mtp_layers(config, mtp, num_layers, tensor_names)
    moe_layers = [False] * (num_layers + num_mtp)
    if num_dense_layers is not None:
        first_moe = config.integer("first_k_dense_replace", num_dense_layers, at_least=0)
        frequency = config.integer("moe_layer_freq", 1)
        moe_layers = [index >= first_moe and index % frequency == 0 for index in range(len(moe_layers))]
        if tensor_names is not None:
            for depth in range(num_mtp):
                moe_layers[num_layers + depth] = f"{mtp.prefix(num_layers, depth)}.mlp.gate.weight" in tensor_names
    return MtpDecoder(
        name=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_mtp_layers=num_mtp,
        ffn_size=config.integer("intermediate_size"),
        moe=moe,
        moe_layers=tuple(moe_layers),
        attention=attention,
        rms_norm_eps=config.positive("rms_norm_eps", rms_norm_eps),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        mtp=mtp,
        recycle_after_head_norm=recycle_after_head_norm,
        chains_mtp_layers=True,
        max_position_embeddings=config.integer("max_position_embeddings", at_least=2),
        eos_token_ids=config.token_ids("eos_token_id", config.integer("vocab_size")),
        initializer_range=config.positive("initializer_range", 0.02),
    )
