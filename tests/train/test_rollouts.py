"""From prompts to a head: a model's own texts by command, a layer taught by them, and none that evaluation knows."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from mtp_jax.checkpoints import load_model
from mtp_jax.checkpoints.token_ranking import read_ranking
from mtp_jax.cli import main
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.registry import family_from_config
from mtp_jax.text import load_tokenizer
from mtp_jax.train import rollouts
from mtp_jax.train.export import write_model
from mtp_jax.train.prompts import Foreign
from mtp_jax.train.rows import read_rows, rows_of
from mtp_jax.train.sampler import SamplerConfig
from tests.cli.conftest import save_tokenizer
from tests.models.dense_goldens import CONFIGS

EOS = 27  # a full stop is the 28th letter of the tests' tokenizer
CONFIG = CONFIGS["smollm2"] | {"eos_token_id": EOS, "dtype": "float32", "initializer_range": 0.3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    family = family_from_config(CONFIG)
    write_model(folder, family, family.init_weights(jax.random.key(1), jnp.float32), CONFIG)
    save_tokenizer(folder)
    return folder


def requests(file: Path, *prompts: object, temperature: float = 0.0) -> Path:
    lines = (json.dumps({"body": {"prompt": prompt, "temperature": temperature}}) for prompt in prompts)
    file.write_text("\n".join(lines) + "\n")
    return file


def test_commands_lead_from_prompts_to_a_head(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = requests(tmp_path / "prompts.jsonl", "a dog", "the fox runs", "far too long to be answered", "b", "it")
    judged = requests(tmp_path / "judged.jsonl", "over the", "hills", temperature=1.0)
    sizes = ("--batch-size", "4", "--prompt-tokens", "12", "--max-tokens", "8")
    asked = ("--model", model, "--prompts", prompts, "--judged", judged, "--out", tmp_path / "texts", *sizes)
    rollouts.main([str(each) for each in asked])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rows"], line["left_out"]) for line in said] == [(2, 0), (4, 0)]
    rows = read_rows(tmp_path / "texts" / "rows.npz", 48)
    assert rows.prompt_lens_N.tolist() == [5, 12, 1, 2]
    assert rows.num_answer_tokens == said[1]["answer_tokens"]

    letters = load_tokenizer(model)
    assert letters is not None
    spoken = letters.decode(rows.answers()[0].tolist())
    foreign = tmp_path / "foreign.txt"
    foreign.write_text(f"{spoken} {spoken}")
    monkeypatch.setattr(rollouts, "Foreign", lambda texts: Foreign(texts, 1))
    rollouts.main([*map(str, asked), "--not-in", str(foreign), "--out", str(tmp_path / "fewer")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] >= 1

    data, held_out = tmp_path / "texts" / "rows.npz", tmp_path / "texts" / "judged-judged.npz"
    course = ("--data", data, "--held-out", held_out, "--steps", 3, "--batch-size", 2, "--evaluate-every", 2)
    teach = ["train", "heads", "--model", model, "--new-mtp-layers", 1, *course, "--out", tmp_path / "head"]
    assert main([*map(str, teach), "--head-only"]) == 0
    log = [json.loads(line) for line in (tmp_path / "head.work" / "log.jsonl").read_text().splitlines()]
    judgements = {record["step"]: record["evaluation"]["judged-judged"] for record in log if "evaluation" in record}
    assert judgements.keys() == {2, 3}
    assert judgements[3]["tokens_per_step"] >= 1.0
    ranking = ["rank-tokens", str(model), "--data", str(data), "--keep", "5", "--output", str(tmp_path / "head")]
    assert main(ranking) == 0
    whole = tmp_path / "whole"
    assert main(["convert", str(model), str(whole), "--to", "hf", "--head", str(tmp_path / "head")]) == 0
    loaded = load_model(whole)
    assert loaded.family.num_mtp_layers == 1
    assert loaded.tokens_by_rank == read_ranking(tmp_path / "head", 48)
    most = np.bincount(np.concatenate(rows.answers()), minlength=48).argmax()
    assert loaded.tokens_by_rank is not None
    assert (len(loaded.tokens_by_rank), loaded.tokens_by_rank[0]) == (5, most)

    def refused(*changes: object) -> str:
        capsys.readouterr()
        assert main([*map(str, (*teach[:-1], tmp_path / "none", *changes))]) == 2
        return capsys.readouterr().err

    assert "--window goes with --data in windows" in refused("--window", 8)
    assert "one run learns from one kind" in refused("--data", prompts)
    assert "--data-parallel is 2" in refused("--data-parallel", 2)
    assert main(["train", "joint", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "none")]) == 2
    assert "texts in rows go with `train heads`" in capsys.readouterr().err
    windows = ["train", "heads", "--model", str(model), "--data", str(prompts), "--out", str(tmp_path / "none")]
    assert main([*windows, "--held-out", str(held_out)]) == 2
    assert "--held-out goes with texts in rows" in capsys.readouterr().err


class _Asked:
    """A sampler that is asked for questions, and gives these answers."""

    def __init__(self, tokenizer: Tokenizer, *answers: str, ends: bool = True):
        self.config = SamplerConfig(prompt_tokens=300)
        self._answers = [[*tokenizer.encode(answer).ids, *([EOS] if ends else [])] for answer in answers]

    def write(self, prompts: list[list[int]], temperatures: list[float], *, max_tokens: int) -> object:
        assert len(prompts) == len(temperatures) == len(self._answers)
        return rows_of([([1], answer[:max_tokens]) for answer in self._answers], 40)


def test_questions_are_whole_and_new_and_none_that_evaluation_asks(tmp_path: Path) -> None:
    letters = save_tokenizer(tmp_path)
    judged = Foreign(["x ray"], shared_words=2)
    asked = _Asked(letters, "what is it", "an x ray", "what is it", "no", "who was that at the door of the house")
    found = rollouts.questions(asked, letters, judged, 5, 20)  # pyright: ignore[reportArgumentType]
    assert len(found) == 1  # the others are foreign's, the same again, too short, without an end
    text = letters.decode(found[0])
    assert "what is it" in text
    assert text.endswith(letters.decode(letters.encode("assistant\n").ids))


def test_what_is_no_request_is_named(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for line, match in (
        ("{}", "line 1, is no request"),
        ('{"body": {"prompt": [1]}}', "line 1, has a prompt that is no"),
    ):
        file.write_text(line)
        with pytest.raises(ConfigError, match=match):
            list(rollouts.prompts_in(file))
    requests(file, "a prompt of more letters than there is room for")
    options = ("--model", model, "--prompts", file, "--out", tmp_path, "--prompt-tokens", "4", "--max-tokens", "4")
    with pytest.raises(ConfigError, match="no prompt of at most 4 tokens"):
        rollouts.main([*map(str, options)])
