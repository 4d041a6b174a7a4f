"""How often a target would accept its MTP drafts on given text: teacher-forced, by depth, with a control.

Draft d (0-based) of a step that starts at position p is right when the MTP pass d says, in row p + d, the token that
the target itself finds most likely there. The text supplies the tokens in between; the hidden states of passes d > 0
are the MTP layer's own. Since nothing is fed back but those, all positions of a text are measured at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.train.data import windows
from mtp_jax.train.loss import cross_entropy, has_input, predict

CONTROL_SHIFT = 37
"""Positions between a draft and the target token that the control compares it with: far, and no round number."""


@dataclass(frozen=True)
class HeadsReport:
    """Acceptance by depth on one text. Tuples have one entry for each depth.

    `conditional`: share of drafts accepted among those whose predecessors were. `cumulative`: share of steps in which
    drafts 0..d are all accepted. `control`: agreement with the target's token `CONTROL_SHIFT` positions on, which must
    be near `chance`, the agreement of independent draws from the two argmax frequencies. Losses are nats per token.
    """

    num_steps: int
    conditional: tuple[float, ...]
    cumulative: tuple[float, ...]
    control: tuple[float, ...]
    chance: tuple[float, ...]
    target_loss: float
    mtp_loss: tuple[float, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted by a verification on average: one, and each draft that is accepted."""
        return 1.0 + sum(self.cumulative)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.__dict__, "mean_acceptance_length": self.mean_acceptance_length}


def evaluate_heads(
    family: ModelFamily,
    weights: Weights,
    tokens: np.ndarray,
    *,
    depths: int = 3,
    window: int = 512,
    batch_size: int = 8,
    max_windows: int | None = None,
) -> HeadsReport:
    """Acceptance of `depths` drafts a step on `tokens`, cut into windows of `window` positions that start afresh.

    Computes in the dtype of `weights`. Raises `ConfigError` for a text shorter than one window, a window that is too
    short for the depths and the control, or more depths than the model can draft.

    >>> report = evaluate_heads(family, weights, read_tokens(path))        # doctest: +SKIP
    >>> report.conditional, report.mean_acceptance_length                  # doctest: +SKIP
    ((0.71, 0.64, 0.60), 2.43)
    """
    if family.num_mtp_layers == 0:
        raise ConfigError("the model has no MTP layer; there are no heads to evaluate.")
    if family.num_mtp_layers > 1 and depths > family.num_mtp_layers:
        raise ConfigError(f"depths is {depths}; the model has {family.num_mtp_layers} MTP layers, one for each depth.")
    if window <= depths + CONTROL_SHIFT:
        raise ConfigError(f"window is {window}; it must be above {depths + CONTROL_SHIFT} (depths and the control).")
    rows = windows(tokens, window + 2)[:max_windows]
    # Equal batches, so that one program serves all; the rest of the text would need another.
    batch_size = min(batch_size, len(rows))
    counts = _counter(family, depths)
    totals: dict[str, Any] = {}
    for start in tqdm(range(0, len(rows) - batch_size + 1, batch_size), desc="evaluation", disable=None, leave=False):
        batch = jax.device_get(counts(weights, jax.device_put(rows[start : start + batch_size])))
        totals = {name: totals.get(name, 0) + np.asarray(value, np.float64) for name, value in batch.items()}
    steps = totals["steps"]
    cumulative = totals["accepted"] / steps
    reached = np.concatenate([[1.0], cumulative[:-1]])
    frequency = {name: totals[name] / totals[name].sum(-1, keepdims=True) for name in ("target_ids", "draft_ids")}
    return HeadsReport(
        num_steps=int(steps),
        conditional=_floats(np.divide(cumulative, reached, out=np.zeros_like(cumulative), where=reached > 0)),
        cumulative=_floats(cumulative),
        control=_floats(totals["control"] / steps),
        chance=_floats(frequency["draft_ids"] @ frequency["target_ids"]),
        target_loss=float(totals["target_loss"] / totals["rows"]),
        mtp_loss=_floats(totals["mtp_loss"] / totals["mtp_rows"]),
    )


def count_batch(family: ModelFamily, weights: Weights, tokens_BT: Int[Array, "B T"], depths: int) -> dict[str, Array]:
    """Sums over one batch of windows; `evaluate_heads` adds them up and divides."""
    predictions = predict(family, weights, tokens_BT, depths)
    batch, length = tokens_BT.shape[0], tokens_BT.shape[1] - 2
    target_BS = jnp.argmax(predictions.target_BSV, axis=-1)
    starts = length - depths - CONTROL_SHIFT  # every start has all its drafts, their counterparts and the control's
    accepted, control, draft_ids, mtp_loss, mtp_rows = [], [], [], [], []
    alive_BP = jnp.ones((batch, starts), bool)
    for depth, draft_BSV in enumerate(predictions.drafts):
        draft_BP = jnp.argmax(draft_BSV[:, depth : depth + starts], axis=-1)
        first = depth + 1  # row p + depth of the draft and row p + depth + 1 of the target speak of the same token
        alive_BP = alive_BP & (draft_BP == target_BS[:, first : first + starts])
        accepted.append(jnp.sum(alive_BP))
        far = first + CONTROL_SHIFT
        control.append(jnp.sum(draft_BP == target_BS[:, far : far + starts]))
        draft_ids.append(jnp.bincount(draft_BP.reshape(-1), length=family.vocab_size))
        rows_1S = has_input(length, depth)
        mtp_loss.append(jnp.sum(jnp.where(rows_1S, cross_entropy(draft_BSV, tokens_BT[:, 2:]), 0.0)))
        mtp_rows.append(batch * jnp.sum(rows_1S))
    return {
        "steps": jnp.int32(batch * starts),
        "rows": jnp.int32(batch * length),
        "accepted": jnp.stack(accepted),
        "control": jnp.stack(control),
        "draft_ids": jnp.stack(draft_ids),
        "target_ids": jnp.bincount(target_BS[:, 1:].reshape(-1), length=family.vocab_size),
        "target_loss": jnp.sum(cross_entropy(predictions.target_BSV, tokens_BT[:, 1:-1])),
        "mtp_loss": jnp.stack(mtp_loss),
        "mtp_rows": jnp.stack(mtp_rows),
    }


@lru_cache(maxsize=8)
def _counter(family: ModelFamily, depths: int) -> Callable[[Weights, Array], dict[str, Array]]:
    return jax.jit(lambda weights, tokens_BT: count_batch(family, weights, tokens_BT, depths))


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
