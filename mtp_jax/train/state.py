"""The training state and the one jitted function that moves it a step on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct, traverse_util
from jaxtyping import Array, Float, Int

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import MTP_ROOT, ModelFamily, Weights
from mtp_jax.train import routing
from mtp_jax.train.loss import Objective, joint_loss, predict

MODES = ("joint", "heads")

Flat = dict[str, Array]
"""Weights by their path, its entries joined with dots."""


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """AdamW with a clipped gradient. Weight decay reaches matrices only; norms and biases have none."""

    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    bias_rate: float = 1e-3
    balance_weight: float = 1e-4

    def transform(self) -> optax.GradientTransformation:
        """Updates for a learning rate of one: the step multiplies them by the rate of the day."""
        decayed = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(1.0, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay, mask=decayed),
        )


@struct.dataclass
class TrainState:
    """Donated to every step. `weights` are the float32 masters; `optimiser` covers the trained ones only."""

    step: Int[Array, ""]
    weights: Mapping[str, Any]
    optimiser: Any


def is_trained(path: str, mode: str) -> bool:
    """Whether gradients move the weight at `path`. Mode "heads" leaves the target, embedding and head as they are.

    >>> is_trained("layers.0.ffn.down", "heads"), is_trained("mtp_layers.0.join", "heads")
    (False, True)
    """
    return not routing.is_correction_bias(path) and _is_moved(path, mode)


def init_state(weights: Weights, mode: str, optimiser: Optimiser) -> TrainState:
    """A fresh state around `weights`, which are copied to float32."""
    if mode not in MODES:
        raise ConfigError(f"training mode is {mode!r}; it must be one of {', '.join(MODES)}.")
    masters = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), dict(weights))
    trained, _ = _split(masters, mode)
    if not trained:
        raise ConfigError("the model has no MTP layer; training its heads needs at least one.")
    return TrainState(jnp.zeros((), jnp.int32), masters, optimiser.transform().init(trained))


def in_dtype(family: ModelFamily, weights: Weights, dtype: Any) -> Weights:
    """The weights as a forward pass wants them: in `dtype`, except those that the family pins."""
    pinned = {".".join(spec.path): spec.dtype for spec in family.tensors()}
    return nested({path: leaf.astype(pinned[path] or dtype) for path, leaf in flat(weights).items()})


TrainStep = Callable[[TrainState, Int[Array, "B T"], Float[Array, ""]], tuple[TrainState, dict[str, Array]]]


def make_train_step(
    family: ModelFamily, *, mode: str, objective: Objective, optimiser: Optimiser, compute_dtype: Any = jnp.bfloat16
) -> TrainStep:
    """`(state, tokens_BT, learning_rate) -> (state, metrics)`, jitted, the state donated.

    Metrics are those of `joint_loss`, and `loss`, `gradient_norm`, `imbalance` (worst expert layer). All weights are
    cast to `compute_dtype` inside the step; gradients, moments and updates are float32.
    """
    transform = optimiser.transform()

    def loss_of(trained: Flat, frozen: Flat, tokens_BT: Int[Array, "B T"]) -> tuple[Array, Any]:
        watched, record = routing.watched(family)
        weights = in_dtype(family, nested({**trained, **frozen}), compute_dtype)
        predictions = predict(watched, weights, tokens_BT, objective.depths)
        loss, metrics = joint_loss(predictions, tokens_BT, objective, trains_target=mode == "joint")
        total = loss + optimiser.balance_weight * record.balance_loss()
        return total, (metrics | {"loss": loss}, record.loads)

    @partial(jax.jit, donate_argnums=0)
    def train_step(
        state: TrainState, tokens_BT: Int[Array, "B T"], learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Array]]:
        trained, frozen = _split(state.weights, mode)
        gradients, (metrics, loads) = jax.grad(loss_of, has_aux=True)(trained, frozen, tokens_BT)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step count
            updates, moments = transform.update(gradients, state.optimiser, trained)
        trained = jax.tree.map(lambda leaf, update: leaf + learning_rate * update, trained, updates)
        moved = {
            path: routing.balanced(frozen[path], loads_X, optimiser.bias_rate)
            for path, loads_X in loads.items()
            if _is_moved(path, mode)
        }
        metrics["gradient_norm"] = optax.tree.norm(gradients)
        if loads:
            metrics["imbalance"] = jnp.max(jnp.stack([routing.imbalance(loads_X) for loads_X in loads.values()]))
        weights = nested({**trained, **frozen, **moved})
        return TrainState(state.step + 1, weights, moments), metrics

    return train_step


def flat(weights: Weights) -> Flat:
    """Nested weights by their paths."""
    flat: Any = traverse_util.flatten_dict(dict(weights), sep=".")
    return flat


def nested(by_path: Flat) -> dict[str, Any]:
    """The inverse of `flat`."""
    return traverse_util.unflatten_dict(by_path, sep=".")


def _is_moved(path: str, mode: str) -> bool:
    return mode == "joint" or path.split(".")[0] == MTP_ROOT


def _split(weights: Weights, mode: str) -> tuple[Flat, Flat]:
    leaves = flat(weights)
    trained = {path: leaf for path, leaf in leaves.items() if is_trained(path, mode)}
    return trained, {path: leaf for path, leaf in leaves.items() if path not in trained}
