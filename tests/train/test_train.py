"""The loop: it learns, it resumes bit for bit, it leaves alone what is frozen, and what it says of itself is true."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.registry import family_from_config
from mtp_jax.train import routing
from mtp_jax.train.attention import DenseAttend
from mtp_jax.train.evaluate import evaluate_heads
from mtp_jax.train.loss import Objective, predict
from mtp_jax.train.state import Optimiser
from mtp_jax.train.train import TrainConfig, Trainer, train
from tests.train.tiny import TINY

JOINT = TrainConfig(
    mode="joint",
    steps=60,
    batch_size=4,
    window=30,
    peak_rate=3e-3,
    warmup_steps=5,
    optimiser=Optimiser(bias_rate=0.02),
    compute_dtype="float32",
    log_every=10,
)
HEADS = replace(
    JOINT, mode="heads", steps=4, warmup_steps=0, objective=Objective(depths=2, distillation=1.0), log_every=1
)


@pytest.fixture(scope="module")
def family():
    return family_from_config(TINY)


@pytest.fixture(scope="module")
def weights(family):
    return family.init_weights(jax.random.key(0), jnp.float32)


@pytest.fixture(scope="module")
def tokens():
    """Sentences over 64 tokens that a small model can learn: each token is followed by one of two."""
    rng = np.random.default_rng(0)
    row = [1]
    for coin in rng.random(4000) < 0.9:
        row.append((5 * row[-1] + 7) % 64 if coin else (3 * row[-1] + 1) % 64)
    return np.asarray(row, np.uint16)


@pytest.fixture(scope="module")
def learned(family, weights, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint")
    trained = train(family, JOINT, tokens, weights, folder)
    return trained, [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def leaves(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def test_both_losses_fall(learned):
    _, log = learned
    assert [record["step"] for record in log] == [10, 20, 30, 40, 50, 60]
    assert log[-1]["target_loss"] < 0.6 * np.log(64)
    assert log[-1]["mtp_loss"][0] < 0.8 * np.log(64)
    assert log[-1]["agreement"][0] > log[0]["agreement"][0] + 0.2


def test_a_run_that_was_stopped_ends_in_the_same_bits(family, weights, tokens, tmp_path):
    config = replace(JOINT, steps=7, save_every=2)
    whole, _ = Trainer(family, config, tokens, tmp_path / "whole").run(weights)
    halves = Trainer(family, config, tokens, tmp_path / "halves")
    _, stopped = halves.run(weights, stop_after=3)
    assert stopped == 3
    other_weights = jax.tree.map(jnp.zeros_like, weights)  # what counts is the snapshot
    resumed, last = Trainer(family, config, tokens, tmp_path / "halves").run(other_weights)
    assert last == 7
    for path, leaf in leaves(whole).items():
        np.testing.assert_array_equal(leaves(resumed)[path], leaf, err_msg=path)


def test_heads_mode_moves_the_mtp_layer_only(family, weights, tokens, tmp_path):
    before = leaves(weights)
    after = leaves(train(family, HEADS, tokens, weights, tmp_path))
    for path, leaf in before.items():
        assert np.array_equal(after[path], leaf) == ("mtp_layers" not in path), path


def test_data_parallel_training_gives_the_same_losses(family, weights, tokens, tmp_path):
    logs = []
    for devices in (1, 4):
        folder = tmp_path / str(devices)
        train(family, replace(HEADS, data_parallel=devices), tokens, weights, folder)
        logs.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
    np.testing.assert_allclose(*logs, rtol=1e-4)


def test_acceptance_is_above_the_control_and_the_control_near_chance(family, learned, tokens):
    report = evaluate_heads(family, learned[0], tokens[:3000], window=60, batch_size=4)
    assert report.conditional[0] > 0.5
    assert 1 < report.mean_acceptance_length < 4
    assert list(report.cumulative) == sorted(report.cumulative, reverse=True)
    np.testing.assert_allclose(np.cumprod(report.conditional), report.cumulative)
    for control, chance in zip(report.control, report.chance, strict=True):
        assert control == pytest.approx(chance, abs=0.05)
        assert control < 0.2


def test_acceptance_counts_whole_chains(family, learned, tokens):
    """Against a loop over one window."""
    window, depths = 60, 3
    report = evaluate_heads(family, learned[0], tokens[: window + 2], window=window, depths=depths)
    row = jnp.asarray(tokens[None, : window + 2].astype(np.int32))
    predictions = jax.jit(lambda weights: predict(family, weights, row, depths))(learned[0])
    target = np.asarray(predictions.target_BSV[0]).argmax(-1)
    drafts = [np.asarray(draft[0]).argmax(-1) for draft in predictions.drafts]
    accepted = np.zeros(depths)
    for p in range(report.num_steps):
        for depth in range(depths):
            if drafts[depth][p + depth] != target[p + depth + 1]:
                break
            accepted[depth] += 1
    np.testing.assert_allclose(report.cumulative, accepted / report.num_steps)


def test_the_correction_bias_balances_the_experts(family, weights, tokens, tmp_path):
    skewed = jax.tree.map(lambda leaf: leaf, weights)
    skewed["layers"]["0"]["ffn"]["correction_bias"] = jnp.array([0.3, 0.3, -0.3, -0.3])
    train(family, JOINT, tokens, skewed, tmp_path)
    log = [json.loads(line)["imbalance"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[0] > 0.8
    assert log[-1] < 0.5


def test_the_watched_family_computes_the_same(family, weights):
    tokens_BS = positions_BS = jnp.arange(10, dtype=jnp.int32)[None]
    kv = (None,) * TINY["num_hidden_layers"]

    @jax.jit
    def both(weights):
        watched, record = routing.watched(family)
        plain, _ = family.forward(weights, tokens_BS, positions_BS, kv, DenseAttend())
        seen, _ = watched.forward(weights, tokens_BS, positions_BS, kv, DenseAttend())
        return plain, seen, record.loads

    plain, seen, loads = both(weights)
    np.testing.assert_allclose(plain, seen, atol=1e-5)
    assert [float(jnp.sum(loads_X)) for loads_X in loads.values()] == [10 * TINY["num_experts_per_tok"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "trunk"}, "'trunk'; it must be one of joint, heads"),
        ({"batch_size": 3, "data_parallel": 2}, "data_parallel=2 must divide"),
        ({"warmup_steps": 99}, "warmup_steps is 99"),
        ({"data_parallel": 64, "batch_size": 64}, "64"),
        ({"window": 100_000}, "the data has"),
    ],
)
def test_a_run_that_cannot_be_is_refused(family, weights, tokens, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        train(family, replace(JOINT, **change), tokens, weights, tmp_path)
