"""The joint loss, and that training sees the attention that serving will use."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.models.registry import family_from_config
from mtp_jax.train.attention import DenseAttend
from mtp_jax.train.loss import Objective, Predictions, joint_loss, predict
from tests.train.tiny import TINY, TINY_TWO_LAYERS

WINDOW = 7
V_CHANNELS = TINY["kv_lora_rank"]


@dataclass(frozen=True)
class OneRow:
    """The plainest serving attention: one row writes its keys at its position and attends from `first` up to there."""

    position: jax.Array
    first: int

    def __call__(self, layer_kv, q_BWHC, k_BWGC, v_BWGE, *, scale, v_channels):
        new = (k_BWGC[0], k_BWGC[0, :, :, :v_channels] if v_BWGE is None else v_BWGE[0])
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, row, self.position, 0)
            for old, row in zip(layer_kv, new, strict=True)
        )
        groups, heads = keys.shape[1], q_BWHC.shape[2]
        q_GMC = q_BWHC[0, 0].reshape(groups, heads // groups, -1) * scale
        scores = jnp.einsum("gmc,tgc->gmt", q_GMC, keys)
        rows = jnp.arange(len(keys))
        known = (rows >= self.first) & (rows <= self.position)
        weights = jax.nn.softmax(jnp.where(known[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("gmt,tge->gme", weights, values).reshape(1, 1, heads, -1), (keys, values)


@pytest.fixture(
    scope="module",
    params=[(TINY, True), (TINY_TWO_LAYERS, True), (TINY_TWO_LAYERS, False)],
    ids=["one layer", "two layers", "two layers that do not chain"],
)
def model(request):
    config, chains = request.param
    family = replace(family_from_config(config), chains_mtp_layers=chains)  # type: ignore[type-var]
    return family, family.init_weights(jax.random.key(0), jnp.float32)


def drafts_when_serving(family, weights, tokens, hidden_SD, position, depths):
    """Logits of the drafts of a step whose last known hidden state is at `position`, one row at a time."""

    @partial(jax.jit, static_argnums=0)
    def draft_row(layer, token, hidden_D, q, layer_kv):
        head, recycled, layer_kv = family.draft_forward(
            weights, layer, token[None, None], hidden_D[None, None], q[None, None], layer_kv, OneRow(q, layer)
        )
        return family.draft_unembed(weights, layer, head)[0, 0], recycled[0, 0], layer_kv

    (spec, *_) = family.draft_kv_specs()
    empty = tuple(jnp.zeros((WINDOW, spec.num_kv_heads, c)) for c in (spec.k_channels, spec.v_channels or V_CHANNELS))
    caches = [empty] * family.num_mtp_layers
    logits, hiddens = [], {q: hidden_SD[q] for q in range(position + 1)}
    for depth in range(depths):
        is_recursive = family.num_mtp_layers == 1
        layer, first = (0, position + depth if depth else 0) if is_recursive else (depth, depth)
        recycled = {}
        for q in range(first, position + depth + 1):
            last, recycled[q + 1], caches[layer] = draft_row(
                layer, tokens[q + 1], hiddens[q], jnp.int32(q), caches[layer]
            )
        logits.append(last)
        if not is_recursive and not family.chains_mtp_layers:
            recycled = {q + 1: hidden_D for q, hidden_D in hiddens.items()}
        hiddens = recycled
    return jnp.stack(logits)


def test_training_passes_equal_drafting_row_by_row(model):
    family, weights = model
    depths = 3 if family.num_mtp_layers == 1 else 2
    tokens = jax.random.randint(jax.random.key(1), (WINDOW + 2,), 0, family.vocab_size)
    predictions = jax.jit(lambda weights: predict(family, weights, tokens[None], depths))(weights)
    positions_BS = jnp.arange(WINDOW, dtype=jnp.int32)[None]
    no_kv = (None,) * len(family.kv_specs())
    hidden_BSD, _ = jax.jit(lambda w: family.forward(w, tokens[None, :WINDOW], positions_BS, no_kv, DenseAttend()))(
        weights
    )
    for position in (0, 3):
        served = drafts_when_serving(family, weights, tokens, hidden_BSD[0], position, depths)
        for depth in range(depths):
            trained = predictions.drafts[depth][0, position + depth]
            np.testing.assert_allclose(trained, served[depth], atol=2e-5 * float(jnp.abs(served).max()), rtol=0)


def test_the_loss_is_the_reports_sum():
    rng = np.random.default_rng(0)
    vocab, tokens = 7, rng.integers(0, 7, (2, WINDOW + 2)).astype(np.int32)
    target, *drafts = rng.normal(size=(3, 2, WINDOW, vocab)).astype(np.float32)
    loss, metrics = joint_loss(
        Predictions(jnp.asarray(target), tuple(map(jnp.asarray, drafts))),
        jnp.asarray(tokens),
        Objective(depths=2, mtp_weight=0.3),
    )

    def surprise(logits, token):
        return -np.log(np.exp(logits[token]) / np.exp(logits).sum())

    rows = [(b, q) for b in range(2) for q in range(WINDOW)]
    target_loss = np.mean([surprise(target[b, q], tokens[b, q + 1]) for b, q in rows])
    mtp = [np.mean([surprise(drafts[d][b, q], tokens[b, q + 2]) for b, q in rows if q >= d]) for d in range(2)]
    agreement = [
        np.mean([drafts[d][b, q].argmax() == target[b, q + 1].argmax() for b, q in rows if d <= q < WINDOW - 1])
        for d in range(2)
    ]
    np.testing.assert_allclose(metrics["target_loss"], target_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["mtp_loss"], mtp, rtol=1e-5)
    np.testing.assert_allclose(metrics["agreement"], agreement, rtol=1e-5)
    np.testing.assert_allclose(loss, target_loss + 0.3 * np.mean(mtp), rtol=1e-5)


def test_distillation_is_zero_for_a_draft_that_copies_the_target():
    target = jax.random.normal(jax.random.key(0), (2, WINDOW, 7))
    shifted = jnp.roll(target, -1, axis=1)
    tokens = jnp.zeros((2, WINDOW + 2), jnp.int32)
    objective = Objective(depths=1, mtp_weight=1.0, distillation=1.0)
    loss, metrics = joint_loss(Predictions(target, (shifted,)), tokens, objective, trains_target=False)
    assert abs(float(loss)) < 1e-6
    assert float(metrics["agreement"][0]) == 1.0
    wrong, _ = joint_loss(Predictions(target, (target,)), tokens, objective, trains_target=False)
    assert float(wrong) > 0.1


def test_distillation_leaves_the_target_alone():
    def loss_of(target):
        objective = Objective(depths=1, mtp_weight=1.0, distillation=1.0)
        draft = jnp.ones((1, WINDOW, 7))
        tokens = jnp.zeros((1, WINDOW + 2), jnp.int32)
        return joint_loss(Predictions(target, (draft,)), tokens, objective, trains_target=False)[0]

    assert not jnp.any(jax.grad(loss_of)(jax.random.normal(jax.random.key(0), (1, WINDOW, 7))))
