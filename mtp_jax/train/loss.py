"""The joint loss of a target and its MTP layers (DeepSeek-V3 report, arXiv 2412.19437, equations 24 and 25).

    loss = target cross-entropy + mtp_weight * mean over depths of the MTP cross-entropy

Rows of a window are positions q = 0..S-1. The target's row q speaks of token q + 1. The MTP pass of depth d (0-based)
takes token q + 1 and, for d = 0, the target's hidden state of q; for d > 0, the hidden state that pass d - 1 gave at
q - 1. Whatever the depth, row q speaks of token q + 2, so rows q < d have no input and count nothing. With one MTP
layer all passes are that layer applied again (as when serving); with several, pass d is layer d.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.train.attention import DenseAttend, RecursiveAttend


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised.

    `depths`: MTP passes in the loss. `mtp_weight`: lambda. `distillation` a: the MTP loss is (1 - a) cross-entropy with
    the text + a KL(target || MTP), the target's law held constant; a = 1 trains for acceptance alone.
    """

    depths: int = 1
    mtp_weight: float = 0.3
    distillation: float = 0.0

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise ConfigError(f"depths is {self.depths}; it must be at least 1.")
        if not 0 < self.mtp_weight < float("inf"):
            raise ConfigError(f"mtp_weight is {self.mtp_weight}; it must be a number above 0.")
        if not 0 <= self.distillation <= 1:
            raise ConfigError(f"distillation is {self.distillation}; it must be from 0 to 1.")


@struct.dataclass
class Predictions:
    """Logits of a window's rows: the target's, and one array for each MTP pass."""

    target_BSV: Float[Array, "B S V"]
    drafts: tuple[Float[Array, "B S V"], ...]


def predict(family: ModelFamily, weights: Weights, tokens_BT: Int[Array, "B T"], depths: int) -> Predictions:
    """Teacher-forced predictions for windows of T = S + 2 tokens."""
    known_BS, next_BS = tokens_BT[:, :-2], tokens_BT[:, 1:-1]
    positions_BS = jnp.broadcast_to(jnp.arange(known_BS.shape[1], dtype=jnp.int32), known_BS.shape)
    no_kv = (None,) * len(family.kv_specs())
    hidden_BSD, _ = family.forward(weights, known_BS, positions_BS, no_kv, DenseAttend())
    target_BSV = family.unembed(weights, hidden_BSD)

    drafts = []
    is_recursive = family.num_mtp_layers == 1
    layer_kv = () if is_recursive else None
    for depth in range(depths):
        layer = 0 if is_recursive else depth
        attend = RecursiveAttend() if is_recursive else DenseAttend(first_row=depth)
        head_BSD, recycled_BSD, layer_kv = family.draft_forward(
            weights, layer, next_BS, hidden_BSD, positions_BS, layer_kv, attend
        )
        drafts.append(family.draft_unembed(weights, layer, head_BSD))
        if is_recursive or family.chains_mtp_layers:
            hidden_BSD = recycled_BSD
        hidden_BSD = jnp.concatenate([hidden_BSD[:, :1], hidden_BSD[:, :-1]], axis=1)
    return Predictions(target_BSV, tuple(drafts))


def cross_entropy(logits_BSV: Float[Array, "B S V"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """-log p(token), nats, of float32 logits."""
    log_total = jax.nn.logsumexp(logits_BSV, axis=-1)
    return log_total - jnp.take_along_axis(logits_BSV, tokens_BS[..., None], axis=-1)[..., 0]


def divergence(target_BSV: Float[Array, "B S V"], draft_BSV: Float[Array, "B S V"]) -> Float[Array, "B S"]:
    """KL(target || draft), nats; no gradient goes into the target."""
    log_target = jax.nn.log_softmax(jax.lax.stop_gradient(target_BSV), axis=-1)
    log_draft = jax.nn.log_softmax(draft_BSV, axis=-1)
    return jnp.sum(jnp.exp(log_target) * (log_target - log_draft), axis=-1)


def has_input(length: int, depth: int) -> Bool[Array, "1 S"]:
    """Rows of the pass of `depth` that have an input."""
    return (jnp.arange(length) >= depth)[None, :]


def joint_loss(
    predictions: Predictions, tokens_BT: Int[Array, "B T"], objective: Objective, *, trains_target: bool = True
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss in nats per token, and what it is made of. Off, `trains_target` leaves the target's own loss out.

    Metrics: `target_loss`; `mtp_loss` [depths], cross-entropy with the text; `agreement` [depths], the share of rows
    whose MTP argmax is the target's argmax for the same token (acceptance, without regard to earlier depths).
    """
    target_BSV, length = predictions.target_BSV, tokens_BT.shape[1] - 2
    target_loss = jnp.mean(cross_entropy(target_BSV, tokens_BT[:, 1:-1]))
    target_ids_BS = jnp.argmax(target_BSV, axis=-1)
    mtp_losses, objectives, agreements = [], [], []
    for depth, draft_BSV in enumerate(predictions.drafts):
        rows_1S = has_input(length, depth)
        text_loss = masked_mean(cross_entropy(draft_BSV, tokens_BT[:, 2:]), rows_1S)
        # The target speaks of token q + 2 in its row q + 1, so the last row of an MTP pass has no counterpart.
        agrees = jnp.argmax(draft_BSV[:, :-1], axis=-1) == target_ids_BS[:, 1:]
        agreements.append(masked_mean(agrees.astype(jnp.float32), rows_1S[:, :-1]))
        mtp_losses.append(text_loss)
        if objective.distillation:
            imitation = masked_mean(divergence(target_BSV[:, 1:], draft_BSV[:, :-1]), rows_1S[:, :-1])
            text_loss = (1 - objective.distillation) * text_loss + objective.distillation * imitation
        objectives.append(text_loss)
    loss = target_loss if trains_target else jnp.zeros((), jnp.float32)
    metrics = {"target_loss": target_loss}
    if objectives:
        loss = loss + objective.mtp_weight * jnp.mean(jnp.stack(objectives))
        metrics |= {"mtp_loss": jnp.stack(mtp_losses), "agreement": jnp.stack(agreements)}
    return loss, metrics


def masked_mean(values_BS: Float[Array, "B S"], rows_1S: Bool[Array, "1 S"]) -> Float[Array, ""]:
    """Mean over the rows that are marked."""
    return jnp.sum(jnp.where(rows_1S, values_BS, 0.0)) / (values_BS.shape[0] * jnp.sum(rows_1S).astype(jnp.float32))
