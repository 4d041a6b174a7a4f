"""Token files, batches and the tokenizer."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.core.errors import ConfigError
from mtp_jax.train import data, tokenizer
from mtp_jax.train.data import Batches

TEXTS = [
    "def f(x):\n    return x + 2024\n",
    "It was the best of times. \u00e9\u4e2d\n",
    "    \t\n\n<|endoftext|> 007 ",
] * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train(iter(TEXTS), folder, vocab_size=300)
    return folder


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_every_text_survives_encoding(trained, text):
    loaded = tokenizer.load(trained)
    text = text.replace(tokenizer.END_OF_TEXT, "")
    assert loaded.decode(loaded.encode(text).ids) == text


def test_every_digit_is_a_token_of_its_own(trained):
    tokens = tokenizer.load(trained).encode("x2024").tokens
    assert tokens[-4:] == ["2", "0", "2", "4"]


def test_end_of_text_is_token_zero_and_named_in_the_config(trained):
    assert tokenizer.end_of_text(tokenizer.load(trained)) == 0
    config = json.loads((trained / "tokenizer_config.json").read_text())
    assert config["eos_token"] == config["bos_token"] == tokenizer.END_OF_TEXT


def test_a_token_file_holds_its_sequences_with_separators(tmp_path):
    count = data.write_tokens(tmp_path / "a.tokens.xz", [[5, 6], [65535]], separator=0)
    assert count == 6
    assert data.read_tokens(tmp_path / "a.tokens.xz").tolist() == [0, 5, 6, 0, 65535, 0]


def test_a_token_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="65536"):
        data.write_tokens(tmp_path / "a.tokens.xz", [[65536]], separator=0)


def test_a_truncated_token_file_is_refused(tmp_path):
    path = tmp_path / "a.tokens.xz"
    data.write_tokens(path, [list(range(1000))], separator=0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.tokens\.xz"):
        data.read_tokens(path)


def test_batches_depend_on_seed_and_step_alone():
    tokens = np.arange(5000, dtype=np.uint16)
    first, second = (Batches(tokens, window=16, batch_size=4, seed=3) for _ in range(2))
    steps = [0, 250, 3, 77, 250, 0]
    forwards = {step: first.at(step) for step in sorted(set(steps))}
    for step in steps:
        np.testing.assert_array_equal(second.at(step), forwards[step])
    assert not np.array_equal(Batches(tokens, window=16, batch_size=4, seed=4).at(0), forwards[0])


def test_an_epoch_visits_each_window_once_and_the_next_epoch_differs():
    batches = Batches(np.arange(4000, dtype=np.uint16), window=10, batch_size=3, seed=0)
    epochs = [
        np.concatenate([batches.at(epoch * batches.steps_per_epoch + i) for i in range(batches.steps_per_epoch)])
        for epoch in range(2)
    ]
    for rows in epochs:
        assert (np.diff(rows, axis=1) == 1).all()
        assert len(np.unique(rows)) == rows.size
        assert rows.size > 0.98 * (4000 - 20)
    assert not np.array_equal(epochs[0], epochs[1])


def test_too_little_data_is_refused():
    with pytest.raises(ConfigError, match="50 tokens"):
        Batches(np.arange(50, dtype=np.uint16), window=10, batch_size=8, seed=0)
