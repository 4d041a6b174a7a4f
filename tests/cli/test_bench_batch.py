"""`bench batch`: jobs of several processes write the same tokens; what it cannot do is said before anything starts."""

import json
from pathlib import Path

import pytest

from mtp_jax.bench.batch import Job
from mtp_jax.cli.main import main
from mtp_jax.core.errors import EngineFailed

SMALL = ("--requests", "6", "--max-tokens", "8", "--max-model-len", "64", "--max-num-seqs", "2")


@pytest.mark.long
@pytest.mark.multiprocess
def test_one_process_and_two(capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ("--policy", "fixed", "--num-speculative-tokens", "1")
    assert main(["bench", "batch", "--processes", "1", "2", *SMALL, *drafting]) == 0
    out = capsys.readouterr().out.splitlines()
    facts = json.loads(out[-1])
    assert facts["equal"] == [6, 6]
    assert [job["num_processes"] for job in facts["jobs"]] == [1, 2]
    assert [job["num_tokens"] for job in facts["jobs"]] == [48, 48]
    assert out[1].endswith("1.00x")


@pytest.mark.multiprocess
def test_a_process_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("")
    (tmp_path / "options.json").write_text('{"model": "no-such-model"}')
    job = Job(tmp_path / "requests.jsonl", tmp_path / "options.json")
    with pytest.raises(EngineFailed, match=r"Process 0 of 1 failed: .*no-such-model"):
        job.run(tmp_path / "1", 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--processes", "0"), "--processes"),
        (("--processes", "2", "2"), "--processes"),
        (("--requests", "0"), "--requests"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--gpus", "0"), "--gpus"),
        (("--mesh", "data=2"), "bench mesh"),
        (("--method", "none", "--num-speculative-tokens", "2"), "--method none"),
        (("--prompts", "no-such-file"), "no-such-file"),
    ],
)
def test_what_cannot_be_done(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "batch", *arguments]) == 2
    assert named in capsys.readouterr().err
