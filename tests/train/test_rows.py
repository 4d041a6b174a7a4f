"""Texts in rows: what a sampler writes is what the target says, and a layer learns from it what it drafts with."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.registry import family_from_config
from mtp_jax.train.loss import Objective, predict
from mtp_jax.train.row_lessons import UNREACHED_WEIGHT, DraftingJudge, KnownRows, RowLessons, row_loss, steps_through
from mtp_jax.train.rows import TextRows, joined, read_rows, rows_of, write_rows
from mtp_jax.train.sampler import Sampler, SamplerConfig
from mtp_jax.train.state import MTP_ROOT, Optimiser
from mtp_jax.train.train import TrainConfig, Trainer
from tests.models.dense_goldens import CONFIGS
from tests.train.tiny import TINY

EOS = 3
CONFIG = CONFIGS["smollm2"] | {"num_nextn_predict_layers": 1, "eos_token_id": EOS, "initializer_range": 0.3}
SAMPLER = SamplerConfig(batch_size=4, prompt_tokens=6, max_tokens=10)
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16], [20, 21], [22, 23, 24], [30]]
OBJECTIVE = Objective(depths=3, mtp_weight=1.0, distillation=0.5)


@pytest.fixture(scope="module")
def family():
    return family_from_config(CONFIG)


@pytest.fixture(scope="module")
def weights(family):
    return family.init_weights(jax.random.key(1), jnp.float32)


@pytest.fixture(scope="module")
def sampler(family, weights):
    return Sampler(family, weights, SAMPLER)


@pytest.fixture(scope="module")
def rows(sampler):
    return sampler.write(PROMPTS, [0.0] * len(PROMPTS))


def test_greedy_rows_are_what_the_target_finds_most_likely(family, weights, rows):
    assert [row[:length].tolist() for row, length in zip(rows.tokens_NS, rows.prompt_lens_N, strict=True)] == PROMPTS
    logits_NSV = family.unembed(weights, KnownRows.of(family, weights, rows).hidden_NSD)
    likely_NS = np.asarray(jnp.argmax(logits_NSV, axis=-1))
    for likely_S, row, start, end in zip(likely_NS, rows.tokens_NS, rows.prompt_lens_N, rows.lengths_N, strict=True):
        assert likely_S[start - 1 : end - 1].tolist() == row[start:end].tolist()


def test_a_row_ends_with_the_end_of_its_text(sampler):
    rows = sampler.write([[5, 6, 7]] * 40, [2.0] * 40)
    ended = [answer.tolist() for answer in rows.answers()]
    assert any(len(answer) < SAMPLER.max_tokens for answer in ended)
    for answer in ended:
        assert EOS not in answer[:-1]
        assert len(answer) == SAMPLER.max_tokens or answer[-1] == EOS
    assert len({tuple(answer) for answer in ended}) > 20
    cut = sampler.write(PROMPTS, [0.0] * len(PROMPTS), max_tokens=2)
    assert max(len(answer) for answer in cut.answers()) == 2


def test_a_temperature_of_one_draws_from_the_targets_law(family, weights, sampler):
    drawn = [answer[0] for answer in sampler.write([[5, 6, 7]] * 2000, [1.0] * 2000, max_tokens=1).answers()]
    row = rows_of([([5, 6, 7], [])], SAMPLER.width)
    logits_V = family.unembed(weights, KnownRows.of(family, weights, row).hidden_NSD)[0, 2]
    law_V = np.asarray(jax.nn.softmax(logits_V), np.float64)
    expected_V, found_V = 2000 * law_V, np.bincount(drawn, minlength=len(law_V))
    often_V = expected_V >= 5
    statistic = np.sum((found_V - expected_V)[often_V] ** 2 / expected_V[often_V])
    assert statistic < often_V.sum() + 6 * np.sqrt(2 * often_V.sum())


def test_what_a_sampler_cannot_do_is_refused(family, weights, sampler):
    with pytest.raises(ConfigError, match="a prompt has 7 tokens; allowed are 1 to 6"):
        sampler.write([[1] * 7], [0.0])
    with pytest.raises(ConfigError, match="max_tokens is 11; this sampler has room for 1 to 10"):
        sampler.write([[1]], [0.0], max_tokens=11)
    with pytest.raises(ConfigError, match="max_position_embeddings="):
        Sampler(family, weights, replace(SAMPLER, max_tokens=CONFIG["max_position_embeddings"]))
    latent = family_from_config(TINY)
    with pytest.raises(ConfigError, match="latent KV are sampled with run-batch"):
        Sampler(latent, {}, SAMPLER)


def test_passes_over_rows_are_those_of_windows(family, weights, rows):
    batch = KnownRows.of(family, weights, rows).at(jnp.arange(len(rows)))
    expected = predict(family, weights, jnp.asarray(rows.tokens_NS), 3).drafts
    for head_BLD, draft_BLV in zip(batch.passes(family, weights, 3), expected, strict=True):
        assert np.allclose(family.draft_unembed(weights, 0, head_BLD), draft_BLV, atol=1e-5)


def test_the_loss_counts_answers_and_drafts_whose_predecessors_are_right(family, weights, rows):
    """Against a loop over texts and positions."""
    batch = KnownRows.of(family, weights, rows).at(jnp.arange(len(rows)))
    predictions = predict(family, weights, jnp.asarray(rows.tokens_NS), 3)
    log_target, *log_drafts = (
        np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)
        for logits in (predictions.target_BSV, *predictions.drafts)
    )
    num_rows, loss, right = 0, 0.0, {}
    for text, (start, end) in enumerate(zip(rows.prompt_lens_N, rows.lengths_N, strict=True)):
        for told in range(start + 1, end):
            num_rows += 1
            q, token = told - 2, int(rows.tokens_NS[text, told])
            for depth, log_draft in enumerate(log_drafts):
                reached = depth == 0 or right.get((text, q - 1, depth - 1), False)
                right[text, q, depth] = reached and log_draft[text, q].argmax() == token
                law = np.exp(log_target[text, q + 1])
                imitation = np.sum(law * (log_target[text, q + 1] - log_draft[text, q]))
                weight = 1.0 if reached else UNREACHED_WEIGHT
                loss += weight * (0.5 * -log_draft[text, q, token] + 0.5 * imitation)
    found, metrics = row_loss(family, weights, batch, OBJECTIVE, 128)
    assert metrics["rows"] == num_rows
    assert float(found) == pytest.approx(loss / num_rows, rel=1e-4)
    # Of a batch with more rows than there is room for, the first are taken.
    assert row_loss(family, weights, batch, OBJECTIVE, 8)[1]["rows"] == 8


def lessons(family, weights, rows, **changes):
    options = {"objective": OBJECTIVE, "optimiser": Optimiser(), "batch_size": 4, "compute_dtype": "float32"}
    return RowLessons(family, weights, rows, **{**options, **changes})


def test_a_layer_learns_from_rows_and_a_stopped_run_ends_in_the_same_bits(family, weights, rows, tmp_path):
    config = TrainConfig(
        mode="heads",
        steps=40,
        batch_size=4,
        window=16,
        peak_rate=5e-3,
        objective=OBJECTIVE,
        log_every=10,
        save_every=10,
    )
    judge = DraftingJudge(family, weights, rows)
    start = {MTP_ROOT: weights[MTP_ROOT]}
    taught = lessons(family, weights, rows)
    whole, _ = Trainer(family, config, taught, tmp_path / "whole").run(start)
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    assert judge(whole)["tokens_per_step"] > judge(start)["tokens_per_step"] + 0.3
    halves = Trainer(family, config, taught, tmp_path / "halves")
    halves.run(start, stop_after=13)
    resumed, _ = halves.run(start)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, resumed))
    assert set(whole) == {MTP_ROOT}


def test_a_judge_walks_as_an_engine_does():
    """Token 3 of a text is known, 12 is its last; row q of draft d speaks of token q + 2."""
    right_KL = np.zeros((3, 12), bool)
    right_KL[0, 2], right_KL[1, 3] = True, True  # tokens 4 and 5 are kept, 6 is corrected
    right_KL[:, 6:] = True  # token 7 is corrected; then 8, 9, 10 are kept, 11 is a bonus, 12 ends the text
    assert list(steps_through(right_KL, 3, 12)) == [(3, 2), (1, 0), (3, 3), (1, 1)]


def test_a_judge_counts_what_the_passes_say(family, weights, rows):
    batch = KnownRows.of(family, weights, rows).at(jnp.arange(len(rows)))
    heads = batch.passes(family, weights, 2)
    said = [np.asarray(jnp.argmax(family.draft_unembed(weights, 0, head), axis=-1)) for head in heads]
    walks = []
    for text, (start, end) in enumerate(zip(rows.prompt_lens_N, rows.lengths_N, strict=True)):
        right_KL = np.stack([ids[text] == rows.tokens_NS[text, 2:] for ids in said])
        walks += steps_through(right_KL, int(start), int(end) - 1)
    judged = DraftingJudge(family, weights, rows, depths=2, batch_size=4)({MTP_ROOT: weights[MTP_ROOT]})
    assert judged["steps"] == len(walks)
    assert judged["tokens"] == (rows.lengths_N - rows.prompt_lens_N - 1).sum()
    assert judged["kept"][0] == pytest.approx(np.mean([kept > 0 for _, kept in walks]), abs=1e-4)


def test_every_text_is_seen_once_an_epoch(family, weights, rows):
    taught = lessons(family, weights, joined([rows, rows]), batch_size=3)
    first = [index for step in range(4) for index in taught.at(step)]
    assert sorted(first) == list(range(12))
    assert [index for step in range(4, 8) for index in taught.at(step)] != first
    assert np.array_equal(taught.at(6), lessons(family, weights, joined([rows, rows]), batch_size=3).at(6))


def test_a_layer_that_cannot_learn_from_rows_is_refused(family, weights, rows):
    with pytest.raises(ConfigError, match="an MTP layer with experts does not learn from rows"):
        lessons(family_from_config(TINY), {}, rows)
    with pytest.raises(ConfigError, match="the rows are 129 wide"):
        lessons(family, weights, rows_of([([1, 2], [3, 4])], 129))
    with pytest.raises(ConfigError, match="there are 6 texts; a batch has 7"):
        lessons(family, weights, rows, batch_size=7)
    nothing = rows_of([([1, 2], [3])] * 4, 16)
    with pytest.raises(ConfigError, match="there is nothing to draft"):
        lessons(family, weights, nothing)
    with pytest.raises(ConfigError, match="there is nothing to draft"):
        DraftingJudge(family, weights, nothing)


def test_a_file_of_rows_is_read_as_it_was_written_or_refused(rows, tmp_path: Path):
    file = tmp_path / "rows.npz"
    write_rows(file, rows)
    read = read_rows(file, 64)
    for name in ("tokens_NS", "prompt_lens_N", "lengths_N"):
        assert np.array_equal(getattr(read, name), getattr(rows, name))

    def refused(match: str, vocab_size: int = 64) -> None:
        with pytest.raises(ConfigError, match=match):
            read_rows(file, vocab_size)

    refused("the model's go to 3", 4)
    write_rows(file, TextRows(rows.tokens_NS, rows.lengths_N + 1, rows.lengths_N))
    refused("prompts that are empty or longer than their texts")
    write_rows(file, TextRows(rows.tokens_NS, rows.prompt_lens_N[1:], rows.lengths_N[1:]))
    refused("for 5 lengths")
    write_rows(file, rows_of([], 4))
    refused("has no text in it")
    file.write_bytes(file.read_bytes()[:100])
    refused("holds no texts in rows")
    with pytest.raises(ConfigError, match="token ids go to 65536"):
        write_rows(file, rows_of([([1 << 16], [])], 4))
    with pytest.raises(ConfigError, match="a text has 5 tokens; a row holds 4"):
        rows_of([([1, 2, 3], [4, 5])], 4)
