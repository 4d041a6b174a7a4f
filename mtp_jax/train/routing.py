"""Balancing the experts without an auxiliary loss (DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2).

The routers' correction bias only decides which experts are chosen. After each step it goes up by a fixed amount for
experts that got less than their share of the batch and down for the others. A very small sequence-wise loss (equations
17 to 20 there) keeps single sequences from using one expert alone.
"""

from dataclasses import dataclass, field, fields
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.decoder import DecoderLayer, DecoderModule, MtpDecoder
from mtp_jax.models.experts import through_all
from mtp_jax.models.layers import RmsNorm
from mtp_jax.models.moe import Moe, MoeConfig, route
from mtp_jax.ops.sharding import Parallel


@dataclass(eq=False)
class RoutingRecord:
    """What the expert layers did during one trace, by the path of their correction bias (entries joined with dots).

    `loads`: tokens sent to each expert, summed over the calls of a layer. `balance_losses`: one value a call.
    """

    loads: dict[str, Float[Array, " X"]] = field(default_factory=dict)
    balance_losses: list[Float[Array, ""]] = field(default_factory=list)

    def add(self, path: str, loads_X: Float[Array, " X"], balance_loss: Float[Array, ""]) -> None:
        """One call of the layer."""
        self.loads[path] = self.loads[path] + loads_X if path in self.loads else loads_X
        self.balance_losses.append(balance_loss)

    def balance_loss(self) -> Float[Array, ""]:
        """Sum over the calls; zero where there are none."""
        return sum(self.balance_losses, start=jnp.zeros((), jnp.float32))


def watched(family: ModelFamily) -> tuple[ModelFamily, RoutingRecord]:
    """The same family, its expert layers writing into the record. For one trace: the record then holds its tracers.

    A family without expert layers comes back as it is, with a record that stays empty.
    """
    record = RoutingRecord()
    if not isinstance(family, MtpDecoder) or family.moe is None:
        return family, record
    own = {f.name: getattr(family, f.name) for f in fields(family)}
    return _WatchedDecoder(**own, record=record), record


def is_correction_bias(path: str) -> bool:
    """Whether a weight is moved by `balanced` instead of by gradients."""
    return path.split(".")[-1] == "correction_bias"


def balanced(bias_X: Float[Array, " X"], loads_X: Float[Array, " X"], rate: float) -> Float[Array, " X"]:
    """The bias after a step in which the experts got `loads_X` tokens.

    >>> balanced(jnp.zeros(3), jnp.array([4.0, 1.0, 1.0]), rate=0.5).tolist()
    [-0.5, 0.5, 0.5]
    """
    return bias_X + rate * jnp.sign(jnp.mean(loads_X) - loads_X)


def imbalance(loads_X: Float[Array, " X"]) -> Float[Array, ""]:
    """Largest load over the mean load, minus one (the report's MaxVio): 0 is perfect balance."""
    return jnp.max(loads_X) / jnp.mean(loads_X) - 1


@dataclass(frozen=True)
class _WatchedDecoder(MtpDecoder):
    record: RoutingRecord

    def bind(self, weights: Weights) -> DecoderModule:
        module = super().bind(weights)
        for index, layer in enumerate(module.layers):
            _watch(layer, f"layers.{index}.ffn.correction_bias", self.record)
        for index, mtp in enumerate(module.mtp_layers):
            _watch(mtp.layer, f"mtp_layers.{index}.layer.ffn.correction_bias", self.record)
        return module


def _watch(layer: DecoderLayer, path: str, record: RoutingRecord) -> None:
    if isinstance(layer.ffn, Moe):
        layer.ffn = cast(Moe, _WatchedMoe(layer.ffn, path, record))  # called alike


class _WatchedMoe(nnx.Module):
    """The expert layer on whole windows: it records its choices, and its products are two dense ones.

    Serving sorts tokens or skips experts; here the gradient counts, and that of a dense product is two dense products.
    """

    def __init__(self, moe: Moe, path: str, record: RoutingRecord):
        self.moe = moe
        self.path = path
        self.record = record

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        parallel: Parallel,
        norm: RmsNorm | None = None,
        residual_BSD: Float[Array, "B S D"] | None = None,
    ) -> Float[Array, "B S D"]:
        moe, (batch, length, size) = self.moe, x_BSD.shape
        x_TD = (x_BSD if norm is None else norm(x_BSD)).reshape(-1, size)
        logits_TX = jnp.einsum("td,dx->tx", x_TD.astype(jnp.float32), moe.router[...].astype(jnp.float32))
        ids_Tk, weights_Tk = route(logits_TX, moe.correction_bias[...], moe.config)
        loads_BX, loss = _sequence_balance(
            logits_TX.reshape(batch, length, -1), ids_Tk.reshape(batch, length, -1), moe.config
        )
        self.record.add(self.path, jnp.sum(loads_BX, axis=0), loss)
        y_TD = through_all(x_TD, ids_Tk, weights_Tk, moe.gate_up[...], moe.down[...])
        if moe.shared is not None:
            y_TD = y_TD + moe.shared.partial(x_TD)
        y_BSD = parallel.sum_over_model(y_TD).reshape(x_BSD.shape)
        return y_BSD if residual_BSD is None else residual_BSD + y_BSD


def _sequence_balance(
    logits_BSX: Float[Array, "B S X"], ids_BSk: Int[Array, "B S k"], config: MoeConfig
) -> tuple[Float[Array, "B X"], Float[Array, ""]]:
    """Tokens each expert got in each sequence, and the sequence-wise balance loss (1 when perfectly balanced)."""
    num_experts = config.num_experts
    loads_BX = jnp.sum(jax.nn.one_hot(ids_BSk, num_experts, dtype=jnp.float32), axis=(1, 2))
    share_BX = loads_BX * (num_experts / (config.num_active * ids_BSk.shape[1]))
    scores_BSX = jax.nn.sigmoid(logits_BSX) if config.scoring == "sigmoid" else jax.nn.softmax(logits_BSX, axis=-1)
    scores_BSX = scores_BSX / jnp.sum(scores_BSX, axis=-1, keepdims=True)
    loss = jnp.mean(jnp.sum(share_BX * jnp.mean(scores_BSX, axis=1), axis=-1))
    return loads_BX, loss
