"""Mixture of experts: configuration, routing, the layer.

Routing is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): a bias corrects the scores for selection only, and whole
groups of experts are preferred by the sum of their two best. A token's result depends on its own row alone.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.experts import expert_products
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.layers import RmsNorm, gate_up_packing
from mtp_jax.models.linear import XLA, Mlp
from mtp_jax.models.params import param, same, stacked
from mtp_jax.ops.sharding import Parallel


@dataclass(frozen=True)
class MoeConfig:
    """Sizes and routing of one family's expert layers."""

    num_experts: int
    num_active: int
    expert_ffn_size: int
    num_shared: int
    num_groups: int
    num_active_groups: int
    scoring: str  # "sigmoid" or "softmax"
    normalise: bool
    scale: float
    backend: str = "reference"  # of the experts' products

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise ConfigError(
                f"config field 'n_group' is {self.num_groups}; it must divide n_routed_experts={self.num_experts}."
            )
        if self.num_active_groups > self.num_groups:
            raise ConfigError(
                f"config field 'topk_group' is {self.num_active_groups}; it must be at most n_group={self.num_groups}."
            )
        reachable = self.num_active_groups * self.num_experts // self.num_groups
        if self.num_active > reachable:
            raise ConfigError(
                f"config field 'num_experts_per_tok' is {self.num_active}; "
                f"n_routed_experts, n_group and topk_group leave {reachable} experts to choose from."
            )


def read_moe_config(config: HfConfig, *, num_groups: int, num_active_groups: int, scale: float) -> MoeConfig | None:
    """Expert fields of a config; the arguments stand in for absent ones. None where it has no routed experts."""
    num_experts = config.integer("n_routed_experts", 0, at_least=0)
    config.choice("topk_method", "noaux_tc")
    num_shared = config.integer("n_shared_experts", 0, at_least=0)
    scoring, normalise = config.choice("scoring_func", "sigmoid"), config.flag("norm_topk_prob", True)
    num_groups, num_active_groups = (
        config.integer("n_group", num_groups),
        config.integer("topk_group", num_active_groups),
    )
    scale = config.positive("routed_scaling_factor", scale)
    if num_experts == 0:
        config.ignore("num_experts_per_tok", "moe_intermediate_size")
        return None
    return MoeConfig(
        num_experts=num_experts,
        num_active=config.integer("num_experts_per_tok"),
        expert_ffn_size=config.integer("moe_intermediate_size"),
        num_shared=num_shared,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        scoring=scoring,
        normalise=normalise,
        scale=scale,
    )


def route(
    logits_TX: Float[Array, "T X"], bias_X: Float[Array, " X"], config: MoeConfig
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The experts of each token and their weights, float32.

    Example: 4 experts in 2 groups, 1 active group, biased scores .9 .1 | .6 .6: the groups' sums are 1.0 and 1.2, so
    experts 2 and 3 are chosen although expert 0 scores best.
    """
    scores_TX = jax.nn.sigmoid(logits_TX) if config.scoring == "sigmoid" else jax.nn.softmax(logits_TX, axis=-1)
    choice_TX = scores_TX + bias_X[None, :]
    if config.num_active_groups < config.num_groups:
        choice_TX = jnp.where(_in_best_groups(choice_TX, config), choice_TX, -jnp.inf)
    ids_Tk = lax.top_k(choice_TX, config.num_active)[1]
    weights_Tk = jnp.take_along_axis(scores_TX, ids_Tk, axis=1)
    if config.normalise:
        weights_Tk = weights_Tk / (jnp.sum(weights_Tk, axis=1, keepdims=True) + 1e-20)
    return ids_Tk, weights_Tk * config.scale


def _in_best_groups(choice_TX: Float[Array, "T X"], config: MoeConfig) -> Array:
    num_tokens, num_experts = choice_TX.shape
    size = num_experts // config.num_groups
    by_group = choice_TX.reshape(num_tokens, config.num_groups, size)
    group_scores = jnp.sum(lax.top_k(by_group, min(2, size))[0], axis=-1)
    best = lax.top_k(group_scores, config.num_active_groups)[1]
    is_best = jnp.any(best[:, :, None] == jnp.arange(config.num_groups)[None, None, :], axis=1)
    return jnp.repeat(is_best, size, axis=1)


class Moe(nnx.Module):
    """Routed experts and, where the config has them, shared ones. `name` is the checkpoint's prefix."""

    def __init__(self, hidden_size: int, config: MoeConfig, name: str, linear_backend: str = XLA):
        self.config = config
        num_experts, ffn_size = config.num_experts, config.expert_ffn_size
        self.router = param(same(f"{name}.gate.weight", num_experts, hidden_size).transpose(1, 0), (None, None))
        bias = same(f"{name}.gate.e_score_correction_bias", num_experts)
        self.correction_bias = param(bias, (None,), fill=0.0, dtype="float32")
        experts = [f"{name}.experts.{expert}" for expert in range(num_experts)]
        gate_up = stacked([gate_up_packing(hidden_size, ffn_size, expert) for expert in experts])
        self.gate_up = param(gate_up, ("experts", None, None, None))
        down = stacked([same(f"{expert}.down_proj.weight", hidden_size, ffn_size) for expert in experts])
        self.down = param(down.transpose(0, 2, 1), ("experts", None, None))
        shared_size = ffn_size * config.num_shared
        self.shared = Mlp(hidden_size, shared_size, f"{name}.shared_experts", linear_backend) if shared_size else None

    def __call__(
        self,
        x: Float[Array, "*x D"],
        parallel: Parallel,
        norm: RmsNorm | None = None,
        residual: Float[Array, "*x D"] | None = None,
    ) -> Float[Array, "*x D"]:
        """The experts' result for [norm of] x; added to the residual."""
        x_TD = (x if norm is None else norm(x)).reshape(-1, x.shape[-1])
        y_TD = self._routed(x_TD, parallel)
        if self.shared is not None:
            y_TD = y_TD + self.shared.partial(x_TD)
        y = parallel.sum_over_model(y_TD).reshape(x.shape)
        return y if residual is None else residual + y

    def _routed(self, x_TD: Float[Array, "T D"], parallel: Parallel) -> Float[Array, "T D"]:
        """This shard's part of the routed experts' result, to be summed over `model`.

        Each shard routes the tokens of all data shards, and routes them alike: the router is small and replicated.
        """
        all_TD = parallel.gather_slots(x_TD)
        logits_TX = jnp.einsum("td,dx->tx", all_TD.astype(jnp.float32), self.router[...].astype(jnp.float32))
        ids_Tk, weights_Tk = route(logits_TX, self.correction_bias[...], self.config)
        local_ids_Tk = ids_Tk - parallel.expert_offset(self.gate_up.shape[0])
        out_TD = expert_products(
            all_TD, local_ids_Tk, weights_Tk, self.gate_up[...], self.down[...], backend=self.config.backend
        )
        return parallel.sum_slots_home(out_TD)
