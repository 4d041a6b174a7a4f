"""A draft shortlist: its rows are the head's own, a whole one changes nothing, and bad ones are refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.token_ranking import RANKING_FILE, rank_tokens, read_ranking, write_ranking
from mtp_jax.cli.main import main
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.requests import Request
from mtp_jax.llm import LLM
from mtp_jax.models.registry import family_from_config
from mtp_jax.models.shortlist import drafting_weights, with_shortlist
from mtp_jax.proposers.registry import resolve_method
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.toy_family import ToyFamily
from tests.models.shapes import config_of


@pytest.mark.parametrize("is_tied", [False, True])
def test_its_logits_are_the_whole_heads_at_its_tokens(is_tied: bool) -> None:
    family = family_from_config(config_of("glm4_moe", tie_word_embeddings=is_tied, num_nextn_predict_layers=1))
    weights = family.init_weights(jax.random.key(0), "float32")
    ranking = np.random.default_rng(0).permutation(family.vocab_size).tolist()
    listed = with_shortlist(family, weights, ranking, 5)
    hidden = jax.random.normal(jax.random.key(1), (2, 1, family.hidden_size))
    whole = family.draft_unembed(weights, 0, hidden)
    np.testing.assert_array_equal(family.unembed(listed, hidden), whole)  # the target keeps its head
    part = family.draft_unembed(drafting_weights(family, listed), 0, hidden)
    np.testing.assert_allclose(part, whole[..., np.sort(ranking[:5])], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shortlist_of_everything_drafts_what_the_whole_head_drafts(temperature: float) -> None:
    traces = []
    for size in (None, 29):
        engine = restart(toy_engine(max_num_seqs=1, max_draft_len=2, max_model_len=40, draft_vocab_size=size))
        params = SamplingParams(temperature=temperature, max_tokens=20)
        engine.submit(Request("a", (1, 2, 3), params, seed=5, wants_trace=True))
        traces.append([*engine.run()][-1].state.records)
    assert traces[0] == traces[1]


def test_a_ranking_that_is_none_of_this_models_is_refused() -> None:
    family = ToyFamily(vocab_size=6)
    weights = family.init_weights(jax.random.key(0), None)
    for ranking, sentence in [
        (None, "draft_vocab_size=3 needs a ranking of the model's tokens, and there is none beside the weights"),
        ([0, 1], "draft_vocab_size is 3; the ranking has 2 tokens"),
        ([0, 1, 6], "goes from 0 to 6; ids are 0 to 5"),
        ([0, 1, 1], "names a token twice"),
        ([[0, 1, 2]], "must be one row of token ids; it is 2-dimensional"),
        ([0.0, 1.0, 2.0], "1-dimensional float64"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            with_shortlist(family, weights, ranking, 3)


def test_a_size_that_nobody_would_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size is 0; it must be an integer at least 1"):
        SpeculativeConfig(draft_vocab_size=0)
    with pytest.raises(ConfigError, match="draft_vocab_size is 4, which method 'ngram' has no use for"):
        resolve_method(SpeculativeConfig(method="ngram", draft_vocab_size=4), ToyFamily())
    with pytest.raises(ConfigError, match="draft_vocab_size is 4, and method=None is plain decoding"):
        SpeculativeConfig(method=None, draft_vocab_size=4)


def test_ranking_goes_to_the_folder_and_back(tmp_path: Path) -> None:
    assert read_ranking(tmp_path, 5) is None
    file = write_ranking(tmp_path, rank_tokens(np.array([3, 1, 3]), 5))
    assert file.name == RANKING_FILE
    assert [*tmp_path.iterdir()] == [file]
    assert read_ranking(tmp_path, 5) == (3, 1, 0, 2, 4)
    with pytest.raises(CheckpointError, match="goes from 0 to 4; ids are 0 to 3"):
        read_ranking(tmp_path, 4)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="cannot be read as an array of numpy"):
        read_ranking(tmp_path, 5)


def test_the_command_ranks_and_the_bundled_model_drafts_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("for i in range(10):\n    print(i)\n" * 5)
    assert main(["rank-tokens", "tiny-mtp", "--data", str(text), "--output", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["covered"]["256"] == 1.0
    ranking = read_ranking(tmp_path, 10**6)
    assert ranking is not None
    spec = SpeculativeConfig(num_speculative_tokens=1, draft_vocab_size=64)
    with pytest.raises(ConfigError, match=r"draft_vocab_size=64 needs a ranking"):
        LLM("tiny-mtp", speculative_config=spec, max_model_len=64)
    assert len(ranking) == len(set(ranking)) == jnp.max(jnp.array(ranking)) + 1
