"""`mtp-jax run-batch` as a user calls it."""

import json
from pathlib import Path

import pytest

from mtp_jax.cli.main import main


def write_lines(file: Path) -> Path:
    asked = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 4, "temperature": 0}}
    file.write_text(f"{json.dumps(asked)}\nnonsense\n")
    return file


def test_lines_in_lines_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write_lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    command = ["run-batch", "-i", str(source), "-o", str(output), "--max-num-seqs", "1", "--max-model-len", "32"]
    assert main([*command, "--num-speculative-tokens", "1", "--policy", "fixed"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["lines"], last["answered"], last["refused"]) == (2, 1, 1)
    good, bad = (json.loads(line) for line in output.read_text().splitlines())
    assert len(good["response"]["body"]["choices"][0]["text"]) == 4
    assert bad["error"]["code"] == "invalid_request"
    assert main(command) == 2
    assert "exists already; a finished job is not run again" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["lines"], last["results_in_place"]) == (0, True)


def test_what_is_missing_is_said_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl")
    for options, sentence in [
        (["-i", str(source)], "run-batch needs --input FILE and --output FILE."),
        (["-i", str(source), "-o", str(tmp_path / "no" / "out.jsonl")], "is in no folder that exists."),
        (["-i", str(tmp_path / "no.jsonl"), "-o", str(tmp_path / "out.jsonl")], "no.jsonl names no file."),
    ]:
        assert main(["run-batch", *options]) == 2
        assert sentence in capsys.readouterr().err
    assert [*tmp_path.glob("out*")] == []


def test_conversations_need_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    source, template = tmp_path / "in.jsonl", tmp_path / "own.jinja"
    source.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}))
    template.write_text("{{ messages[0].content }}")
    command = ["run-batch", "-i", str(source), "--max-num-seqs", "1", "--max-model-len", "32", "--policy", "fixed"]
    command += ["--num-speculative-tokens", "1"]
    assert main([*command, "-o", str(tmp_path / "refused.jsonl")]) == 0
    assert "has no chat template" in json.loads((tmp_path / "refused.jsonl").read_text())["error"]["message"]
    assert main([*command, "-o", str(tmp_path / "out.jsonl"), "--chat-template", str(template)]) == 0
    (choice,) = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"]
    assert len(choice["message"]["content"]) == len(choice["logprobs"]["content"]) == 4
    capsys.readouterr()
