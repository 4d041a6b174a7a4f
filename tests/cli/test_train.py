"""`train`: what it writes, what it leaves alone, how it goes on, and what it refuses before any work."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoints import LoadedModel, load_model
from mtp_jax.cli import main
from mtp_jax.models.registry import family_from_config
from mtp_jax.train.export import write_model
from mtp_jax.train.state import MTP_ROOT
from tests.cli.conftest import save_tokenizer
from tests.train.tiny import TINY

SMALL_RUN = ("--steps", "3", "--batch-size", "2", "--window", "12", "--log-every", "1", "--depths", "1")


def tiny_model(folder: Path, **settings: object) -> Path:
    config = {**TINY, "dtype": "float32", "hidden_size": 16, **settings}
    family = family_from_config(config)
    write_model(folder, family, family.init_weights(jax.random.key(1), jnp.float32), config)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the quick brown fox. " * 5)
    (folder / "deep" / "b.md").write_text("jumps over the lazy dog. " * 5)
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    return folder


def run(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def changed(before: LoadedModel, after: LoadedModel) -> set[str]:
    """First path entries of the weights that differ."""
    pairs = zip(jax.tree.leaves_with_path(before.weights), jax.tree.leaves(after.weights), strict=True)
    return {path[0].key for (path, old), new in pairs if not np.array_equal(old, new)}


def test_heads_alone_are_trained_and_the_run_goes_on_to_the_same_bits(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again, work = tmp_path / "out", tmp_path / "again", tmp_path / "work"
    arguments = ("heads", "--model", model, "--data", texts, *SMALL_RUN, "--work", work)
    assert run(*arguments, "--out", out) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert f"loss {json.loads((work / 'log.jsonl').read_text().splitlines()[0])['loss']:.3f} (step 1)" in printed.err
    before, after = load_model(model), load_model(out)
    assert after.family == before.family
    assert changed(before, after) == {MTP_ROOT}
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()

    assert run(*arguments, "--out", again, "--resume") == 0  # nothing is left to do but to write the model
    assert not changed(after, load_model(again))
    assert run(*arguments, "--out", tmp_path / "third") == 2
    assert "give --resume" in capsys.readouterr().err
    assert run(*arguments, "--out", tmp_path / "third", "--resume", "--seed", "9") == 2
    assert "seed is 9 and was 0" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_a_model_without_mtp_layers_gets_one_and_its_head_can_be_written_alone(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_model(tmp_path / "plain", num_nextn_predict_layers=0)
    arguments = ("heads", "--model", plain, "--new-mtp-layers", 1, "--data", texts, "--data", texts, *SMALL_RUN)
    assert run(*arguments, "--out", tmp_path / "whole") == 0
    assert run(*arguments, "--out", tmp_path / "head", "--head-only") == 0
    assert main(["convert", str(plain), str(tmp_path / "joined"), "--to", "hf", "--head", str(tmp_path / "head")]) == 0
    whole, joined = load_model(tmp_path / "whole"), load_model(tmp_path / "joined")
    assert whole.family == joined.family
    assert not changed(whole, joined)

    assert run(*arguments, "--model", tmp_path / "whole", "--out", tmp_path / "more") == 2
    assert "has 1 MTP layers already" in capsys.readouterr().err
    assert run("joint", *arguments[1:], "--out", tmp_path / "more") == 2
    assert "--new-mtp-layers goes with `train heads`" in capsys.readouterr().err
    assert main(["convert", str(plain), str(tmp_path / "orbax"), "--head", str(tmp_path / "head")]) == 2
    assert "--head goes with --to hf" in capsys.readouterr().err


def test_joint_training_from_scratch_takes_no_weight_of_the_model(model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("joint", "--from-scratch", "--model", model, "--data", texts, "--out", out, *SMALL_RUN) == 0
    assert changed(load_model(model), load_model(out)) == {*load_model(model).weights}
    assert (tmp_path / "out.work" / "log.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "one of joint, heads"),
        (("both",), "'both'"),
        (("heads",), "--data"),
        (("heads", "--data", "{texts}"), "--out"),
        (("heads", "--data", "no-such", "--out", "{out}"), "no-such cannot be read"),
        (("heads", "--data", "{empty}", "--out", "{out}"), "holds no text files"),
        (("heads", "--data", "{texts}/ignored.bin", "--out", "{out}"), "not UTF-8"),
        (("heads", "--data", "{texts}/a.txt", "--out", "{texts}"), "exists already"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--steps", "0"), "steps is 0"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--batch-size", "0"), "batch_size is 0"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--batch-size", "99"), "the data has"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--window", "1"), "window is 1"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--window", "999"), "max_position_embeddings=256"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--peak-rate", "nan"), "peak_rate is nan"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--depths", "0"), "depths is 0"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--mtp-weight", "-1"), "mtp_weight is -1"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--distillation", "2"), "distillation is 2"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--seed", "-1"), "seed is -1"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--save-every", "-1"), "--save-every is -1"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--data-parallel", "0"), "data_parallel is 0"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--compute-dtype", "int8"), "--compute-dtype"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--resume"), "holds no run to go on with"),
        (("joint", "--data", "{texts}", "--out", "{out}", "--model", "no-such"), "'no-such'"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"texts": str(texts), "empty": str(tmp_path / "empty"), "out": str(tmp_path / "out")}
    filled = [argument.format(**places) for argument in arguments]
    if len(filled) > 1 and "--model" not in filled:
        filled += ["--model", str(model)]
    assert run(*SMALL_RUN, *filled) == 2  # the later of two values counts
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_without_mtp_layers_or_tokenizer_is_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("heads", "--data", texts, "--out", tmp_path / "out", *SMALL_RUN, "--model")
    assert run(*arguments, tiny_model(tmp_path / "plain", num_nextn_predict_layers=0)) == 2
    assert "no MTP layer" in capsys.readouterr().err
    silent = tiny_model(tmp_path / "silent")
    (silent / "tokenizer.json").unlink()
    assert run(*arguments, silent) == 2
    assert "no tokenizer" in capsys.readouterr().err
