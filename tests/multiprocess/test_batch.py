"""A batch on one engine that spans processes: unequal shares, an empty one, and processes that share a data shard."""

import json
from pathlib import Path

import pytest

from mtp_jax.testing.toy_family import ToyFamily
from tests.batch.test_run import answer, expected
from tests.batch.toy_job import good_line
from tests.multiprocess.test_vote import run_processes


@pytest.mark.parametrize(
    "mesh", [(2, 1), pytest.param((1, 2), marks=pytest.mark.long)], ids=["a data shard each", "one data shard for both"]
)
def test_one_engine_over_two_processes(tmp_path: Path, mesh: tuple[int, int]) -> None:
    """Process 1 of the first mesh has nothing to do but to take part: all lines of its share are odd."""
    lines = [b"nonsense\n" if number % 2 else good_line(number) for number in range(14)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    ended = run_processes(2, local_devices=1, mesh=mesh, case="batch", folder=str(tmp_path), limit_s=240)
    for process in ended:
        assert process.status == 0, process.errors[-3000:]
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(results) == 14
    for number, (raw, result) in enumerate(zip(lines, results, strict=True)):
        if number % 2:
            assert "not JSON" in result["error"]["message"]
        else:
            assert answer(result) == expected(raw.rstrip(b"\n"), ToyFamily(vocab_size=30))
    said = [line for process in ended for line in process.output.splitlines() if "right:" in line]
    num_lines = 14 if mesh == (1, 2) else 7
    assert all(line.startswith(f"right: {num_lines} lines") for line in said)
    assert any(line.endswith("True") for line in said)  # two that end at the same moment may both merge
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
