"""Heads that learn from texts of their target, row by row, with the target's hidden states computed once for all.

Over `mtp_jax.train.loss` there are three differences. The target's own passes are not repeated: a step runs the MTP
layer and the unembedding alone. Only rows that speak of an answer count; of prompts nothing is drafted. And a draft of
depth d counts in full where the drafts before it are right, else `UNREACHED_WEIGHT` as much: a verification that
throws one draft away never looks at the next. So the loss follows the number of drafts that are kept:

    loss = mtp_weight * sum over d of mean over rows of (weight * ((1 - a) cross-entropy + a KL(target || MTP)))
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import MTP_ROOT, ModelFamily, Weights
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.train.attention import DenseAttend, RecursiveAttend
from mtp_jax.train.loss import Objective, cross_entropy, divergence
from mtp_jax.train.rows import TextRows
from mtp_jax.train.state import Flat, Optimiser, TrainState, flat, in_dtype, nested

UNREACHED_WEIGHT = 0.1
"""Of a draft whose predecessors are wrong: enough to begin with, when nearly all are."""
HIDDEN_BATCH = 128
"""Texts of which the target's hidden states are computed at once."""


@dataclass(frozen=True, eq=False)
class KnownRows:
    """Rows on the device beside the target's hidden states (after its final norm) of every column."""

    tokens_NS: Int[Array, "N S"]
    prompt_lens_N: Int[Array, " N"]
    lengths_N: Int[Array, " N"]
    hidden_NSD: Float[Array, "N S D"]

    @classmethod
    def of(cls, family: ModelFamily, weights: Weights, rows: TextRows) -> "KnownRows":
        """Runs the target over the rows, in the dtype of `weights`."""
        num_rows, batch = len(rows), min(HIDDEN_BATCH, len(rows))
        tokens_NS, run = jax.device_put(rows.tokens_NS), _target(family)
        dtype = jax.tree.leaves(weights)[0].dtype
        hidden_NSD = jnp.zeros((*tokens_NS.shape, family.hidden_size), dtype)
        starts = [*range(0, num_rows - batch, batch), num_rows - batch]
        for start in tqdm(starts, desc="hidden states", unit="batch", disable=None):
            hidden_NSD = _put(hidden_NSD, run(weights, tokens_NS[start : start + batch]), np.int32(start))
        return cls(tokens_NS, jnp.asarray(rows.prompt_lens_N), jnp.asarray(rows.lengths_N), hidden_NSD)

    def at(self, indices_B: Int[Array, " B"]) -> "RowBatch":
        """The texts of these numbers."""
        return RowBatch(*_taken((self.tokens_NS, self.prompt_lens_N, self.lengths_N, self.hidden_NSD), indices_B))


# Programs that see how many texts there are stay small: the large ones serve any number.


@jax.jit
def _taken(fields: tuple[Array, ...], indices_B: Array) -> tuple[Array, ...]:
    return tuple(field[indices_B] for field in fields)


@partial(jax.jit, donate_argnums=0)
def _put(all_NSD: Array, some_BSD: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(all_NSD, some_BSD, start, axis=0)


@lru_cache(maxsize=4)
def _target(family: ModelFamily) -> Callable[[Weights, Array], Array]:
    @jax.jit
    def hidden(weights: Weights, tokens_BS: Array) -> Array:
        positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1], dtype=jnp.int32), tokens_BS.shape)
        no_kv = (None,) * len(family.kv_specs())
        return family.forward(weights, tokens_BS, positions_BS, no_kv, DenseAttend())[0]

    return hidden


@struct.dataclass
class RowBatch:
    """Some texts with their hidden states. A pass has L = S - 2 rows: row q is column q, and speaks of token q + 2."""

    tokens_BS: Int[Array, "B S"]
    prompt_lens_B: Int[Array, " B"]
    lengths_B: Int[Array, " B"]
    hidden_BSD: Float[Array, "B S D"]

    @property
    def counted(self) -> Bool[Array, "B L"]:
        """Rows that speak of an answer. Its first token comes with the prompt; drafts begin with the second."""
        told_1L = (jnp.arange(self.tokens_BS.shape[1] - 2) + 2)[None]
        return (told_1L > self.prompt_lens_B[:, None]) & (told_1L < self.lengths_B[:, None])

    def passes(self, family: ModelFamily, weights: Weights, depths: int) -> list[Float[Array, "B L D"]]:
        """What each MTP pass gives the unembedding (see `mtp_jax.train.loss.predict`, whose passes these are)."""
        next_BL, hidden_BLD = self.tokens_BS[:, 1:-1], self.hidden_BSD[:, :-2]
        positions_BL = jnp.broadcast_to(jnp.arange(next_BL.shape[1], dtype=jnp.int32), next_BL.shape)
        layer_kv: Any = ()
        heads = []
        for _ in range(depths):
            head_BLD, hidden_BLD, layer_kv = family.draft_forward(
                weights, 0, next_BL, hidden_BLD, positions_BL, layer_kv, RecursiveAttend()
            )
            heads.append(head_BLD)
            hidden_BLD = jnp.concatenate([hidden_BLD[:, :1], hidden_BLD[:, :-1]], axis=1)
        return heads


class RowLessons:
    """Batches of rows, and the step that trains one MTP layer on them. `Trainer` runs it.

    `batch_size` texts a step, of which at most `max_counted` rows count (in the order of the texts, so it should be
    near what a batch has). An epoch sees every text but a remainder once, in an order that (seed, epoch) gives.
    """

    def __init__(
        self,
        family: ModelFamily,
        frozen: Weights,
        rows: TextRows,
        *,
        objective: Objective,
        optimiser: Optimiser,
        batch_size: int,
        max_counted: int | None = None,
        compute_dtype: Any = jnp.bfloat16,
        seed: int = 0,
    ):
        if family.num_mtp_layers != 1:
            raise ConfigError(f"rows are learnt from by a single MTP layer; the model has {family.num_mtp_layers}.")
        if rows.tokens_NS.shape[1] > family.max_position_embeddings:
            width, limit = rows.tokens_NS.shape[1], family.max_position_embeddings
            raise ConfigError(f"the rows are {width} wide; this model has max_position_embeddings={limit}.")
        if isinstance(family, MtpDecoder) and family.moe_layers[-1]:
            raise ConfigError("an MTP layer with experts does not learn from rows, which have no balance loss.")
        if len(rows) < batch_size:
            raise ConfigError(f"there are {len(rows)} texts; a batch has {batch_size}.")
        self._seed, self._batch_size, self._num_rows = seed, batch_size, len(rows)
        frozen = in_dtype(family, frozen, compute_dtype)
        counted = np.maximum(rows.lengths_N - rows.prompt_lens_N - 1, 0)
        if not counted.any():
            raise ConfigError("no text has two tokens after its prompt; there is nothing to draft.")
        self.counted_per_batch = max_counted or int(np.ceil(counted.mean() / 32) * 32) * batch_size
        self.frozen = frozen
        self._known = KnownRows.of(family, frozen, rows)
        self._step = _row_step(family, objective, optimiser, self.counted_per_batch, compute_dtype)

    def at(self, step: int) -> Int[np.ndarray, " B"]:
        """The texts of batch `step` (0-based), by number."""
        epoch, index = divmod(step, self._num_rows // self._batch_size)
        order = _order(self._seed, epoch, self._num_rows)
        return order[index * self._batch_size : (index + 1) * self._batch_size]

    def step(
        self, state: TrainState, batch: Int[Array, " B"], learning_rate: Float[Array, ""]
    ) -> tuple[TrainState, dict[str, Array]]:
        """One step, with the metrics of `row_loss`; `state` has the MTP layer's weights alone, and is donated."""
        return self._step(state, self.frozen, self._known.at(batch), learning_rate)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Int[np.ndarray, " N"]:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    return rng.permutation(count).astype(np.int32)


def row_loss(
    family: ModelFamily, weights: Weights, batch: RowBatch, objective: Objective, counted: int
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss in nats a row, and what is logged.

    `counted`: rows that enter the unembedding; of a batch that has more, the first. Metrics: `mtp_loss` [depths],
    cross-entropy with the text; `agreement` [depths], the share of rows whose MTP argmax is the text's token, each
    depth alone; `kept` [depths], the same among rows whose earlier drafts are right; `rows`, how many counted.
    """
    counts_BL = batch.counted
    shape, size = counts_BL.shape, counts_BL.size
    (chosen_M,) = jnp.nonzero(counts_BL.reshape(-1), size=counted, fill_value=size)
    is_row_M = chosen_M < size
    chosen_M = jnp.minimum(chosen_M, size - 1)

    def pick(grid_BLx: Array) -> Array:
        return grid_BLx.reshape(size, *grid_BLx.shape[2:])[chosen_M]

    text_M = pick(batch.tokens_BS[:, 2:])
    target_MV = jax.lax.stop_gradient(family.unembed(weights, pick(batch.hidden_BSD[:, 1:-1])))
    total = jnp.maximum(jnp.sum(is_row_M), 1).astype(jnp.float32)
    reached_M = is_row_M
    loss, losses, agreements, kept = jnp.zeros((), jnp.float32), [], [], []
    for head_BLD in batch.passes(family, weights, objective.depths):
        draft_MV = family.draft_unembed(weights, 0, pick(head_BLD))
        text_loss_M = cross_entropy(draft_MV[None], text_M[None])[0]
        loss_M = text_loss_M
        if objective.distillation:
            imitation_M = divergence(target_MV[None], draft_MV[None])[0]
            loss_M = (1 - objective.distillation) * text_loss_M + objective.distillation * imitation_M
        weight_M = jnp.where(reached_M, 1.0, jnp.where(is_row_M, UNREACHED_WEIGHT, 0.0))
        loss = loss + jnp.sum(weight_M * loss_M) / total
        right_M = is_row_M & (jnp.argmax(draft_MV, axis=-1) == text_M)
        losses.append(jnp.sum(jnp.where(is_row_M, text_loss_M, 0.0)) / total)
        agreements.append(jnp.sum(right_M.astype(jnp.float32)) / total)
        num_reached = jnp.maximum(jnp.sum(reached_M.astype(jnp.float32)), 1.0)
        kept.append(jnp.sum((right_M & reached_M).astype(jnp.float32)) / num_reached)
        # The next pass's row q goes on from this one's row q - 1.
        alive_BL = jnp.zeros(size, bool).at[chosen_M].max(right_M & reached_M).reshape(shape)
        reached_M = is_row_M & pick(jnp.pad(alive_BL[:, :-1], ((0, 0), (1, 0))))
    stacked = {"mtp_loss": losses, "agreement": agreements, "kept": kept}
    metrics = {name: jnp.stack(values) for name, values in stacked.items()}
    return objective.mtp_weight * loss, metrics | {"rows": total}


def _row_step(
    family: ModelFamily, objective: Objective, optimiser: Optimiser, counted: int, compute_dtype: Any
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    transform = optimiser.transform()

    @partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState,
        frozen: Weights,
        batch: RowBatch,
        learning_rate: Float[Array, ""],
    ) -> tuple[TrainState, dict[str, Array]]:
        def loss_of(trained: Flat) -> tuple[Array, dict[str, Array]]:
            weights = {**frozen, **in_dtype(family, nested(trained), compute_dtype)}
            return row_loss(family, weights, batch, objective, counted)

        trained = flat(state.weights)
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step count
            updates, moments = transform.update(gradients, state.optimiser, trained)
        trained = jax.tree.map(lambda leaf, update: leaf + learning_rate * update, trained, updates)
        metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(state.step + 1, nested(trained), moments), metrics

    return step


class DraftingJudge:
    """How greedy drafting goes through texts that the target wrote greedily, without running an engine.

    An engine with the same weights takes the same steps, rounding apart. `frozen` has the target's weights, and any for
    the MTP layer.
    """

    def __init__(self, family: ModelFamily, frozen: Weights, rows: TextRows, *, depths: int = 3, batch_size: int = 32):
        if not (rows.lengths_N > rows.prompt_lens_N + 1).any():
            raise ConfigError("no text has two tokens after its prompt; there is nothing to draft.")
        self._frozen, self._rows, self._depths = frozen, rows, depths
        self._batch_size = min(batch_size, len(rows))
        self._known = KnownRows.of(family, self._frozen, rows)
        self._right = _right(family, depths)

    def __call__(self, layers: Weights) -> dict[str, Any]:
        """With the MTP layer in `layers`: "tokens_per_step", "kept", "steps" and "tokens".

        "kept" [depths]: share of each draft that is kept, among those whose predecessors are.
        """
        weights = {**self._frozen, MTP_ROOT: layers[MTP_ROOT]}
        drafted, kept = np.zeros(self._depths), np.zeros(self._depths)
        steps = tokens = 0
        for start in range(0, len(self._rows), self._batch_size):
            indices = np.arange(start, min(start + self._batch_size, len(self._rows)))
            padded = np.resize(indices, self._batch_size).astype(np.int32)
            right_KBL = jax.device_get(self._right(weights, self._known.at(jnp.asarray(padded))))
            for row, index in enumerate(indices):
                first, last = int(self._rows.prompt_lens_N[index]), int(self._rows.lengths_N[index]) - 1
                for judged, length in steps_through(right_KBL[:, row], first, last):
                    drafted[:judged] += 1
                    kept[:length] += 1
                    steps += 1
                tokens += max(last - first, 0)
        shares = (kept / np.maximum(drafted, 1)).round(4).tolist()
        return {"tokens_per_step": round(tokens / steps, 4), "kept": shares, "steps": steps, "tokens": tokens}


def steps_through(right_KL: Bool[np.ndarray, "K L"], first: int, last: int) -> Iterator[tuple[int, int]]:
    """(drafts judged, drafts kept) of each step through a text whose token `first` is known, up to its token `last`.

    `right_KL` says whether draft d of row q is the text's token q + 2. A step keeps the drafts up to the first that is
    wrong and emits one token more; drafts beyond the text are not made.

    >>> list(steps_through(np.array([[True, False, True], [True, False, True]]), 1, 4))
    [(2, 1), (1, 1)]
    """
    at = first
    while at < last:
        drafts = min(len(right_KL), last - at)
        right = [bool(right_KL[depth, at - 1 + depth]) for depth in range(drafts)]
        length = right.index(False) if False in right else drafts
        yield min(length + 1, drafts), length
        at += length + 1


@lru_cache(maxsize=4)
def _right(family: ModelFamily, depths: int) -> Callable[..., Array]:
    @jax.jit
    def right(weights: Weights, batch: RowBatch) -> Array:
        heads = batch.passes(family, weights, depths)
        ids = [jnp.argmax(family.draft_unembed(weights, 0, head_BLD), axis=-1) for head_BLD in heads]
        return jnp.stack(ids) == batch.tokens_BS[None, :, 2:]

    return right
