"""Commands that read and write files: `convert` and `eval-heads`."""

import json
import shutil
from pathlib import Path

import pytest

from mtp_jax.checkpoints import LoadedModel, load_model
from mtp_jax.cli import main
from mtp_jax.train.data import write_tokens
from tests.cli.conftest import save_tokenizer

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_v3_tiny"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A real checkpoint in a folder of its own, with a tokenizer."""
    monkeypatch.setattr("mtp_jax.cli.start.load_model", load_model)
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder)
    save_tokenizer(folder)
    return folder


def test_convert_there_and_back(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orbax, back = tmp_path / "orbax", tmp_path / "back"
    assert main(["convert", str(golden), str(orbax)]) == 0
    assert main(["convert", str(orbax), str(back), "--to", "hf"]) == 0
    assert capsys.readouterr().out == f"{orbax}\n{back}\n"
    first, last = load_model(golden), load_model(back)
    assert isinstance(last, LoadedModel)
    assert first.family == last.family
    assert main(["convert", str(golden), str(orbax)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(golden), str(orbax), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), "folder"), (("a",), "folder"), (("no-such", "b"), "no-such"), (("a", "b", "--to", "gguf"), "--to")],
)
def test_what_cannot_be_converted_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    assert main(["convert", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_eval_heads_reads_text_and_packed_tokens_alike(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 5)
    packed = tmp_path / "text.tokens.xz"
    reports = []
    for file in (text, packed):
        assert main(["eval-heads", str(golden), "--data", str(file), "--window", "64", "--depths", "1"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert lines[1].split()[0] == "1"
        reports.append({name: value for name, value in json.loads(last).items() if name != "data"})
        if file is text:
            tokenizer = save_tokenizer(golden)
            ids = tokenizer.encode(text.read_text()).ids
            write_tokens(packed, [ids[1:-1]], separator=ids[0])
    assert reports[0].keys() == reports[1].keys()
    assert reports[0]["num_steps"] == reports[1]["num_steps"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--data"),
        (("--data", "no-such-file"), "no-such-file"),
        (("--data", "text.txt", "--depths", "0"), "--depths"),
        (("--data", "text.txt", "--window", "9"), "window"),
        (("--data", "text.txt", "--window", "64"), "tokens"),
        (("--data", "foreign.tokens.xz", "--window", "64"), "foreign"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("too short")
    write_tokens(Path("foreign.tokens.xz"), [range(100)], separator=0)
    assert main(["eval-heads", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
