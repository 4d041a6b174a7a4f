"""A batch on one engine that spans processes: unequal shares, an empty one, and processes that share a data shard."""

import json
import time
from pathlib import Path

import pytest

from mtp_jax.testing.toy_family import ToyFamily
from tests.batch.test_run import answer, expected
from tests.batch.toy_job import good_line
from tests.multiprocess.test_vote import run_processes, started


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


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)], ids=["a data shard each", "one data shard for both"])
def test_killed_in_the_middle_one_engine_goes_on_at_the_next_start(tmp_path: Path, mesh: tuple[int, int]) -> None:
    """One process is killed; the other ends by itself. Then both start again."""
    lines = [good_line(number) for number in range(400)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    parts = tmp_path / "out.jsonl.parts"
    options = {"local_devices": 1, "mesh": mesh, "case": "batch", "folder": str(tmp_path)}
    for victim in range(2):
        with started(2, **options) as processes:
            seen = len([*parts.glob("part-*")])
            while len([*parts.glob("part-*")]) < seen + 3:
                time.sleep(0.01)
                assert processes[0][0].poll() is None, processes[0][2].read_text()[-3000:]
            processes[victim][0].kill()
            assert processes[1 - victim][0].wait(timeout=120) != 0
        assert not (tmp_path / "out.jsonl").exists()
    ended = run_processes(2, **options, limit_s=300)
    for process in ended:
        assert process.status == 0, process.errors[-3000:]
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer(one) for one in results] == [expected(raw.rstrip(b"\n"), ToyFamily(vocab_size=30)) for raw in lines]


@pytest.mark.long
def test_a_request_that_breaks_a_device_is_found_by_starting_again(tmp_path: Path) -> None:
    """It is in the second process's share; the first one learns of it by a collective that fails."""
    poison, prompt = 11, [28] * 11
    lines = [good_line(number) for number in range(24)]
    lines[poison] = good_line(poison, prompt=prompt, max_tokens=19)
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    num_starts = 0
    while not (tmp_path / "out.jsonl").exists():
        num_starts += 1
        assert num_starts <= 5
        ended = run_processes(
            2, local_devices=1, mesh=(2, 1), case="batch", folder=str(tmp_path), poison=prompt, limit_s=240
        )
    assert num_starts == 5
    assert [process.status for process in ended] == [0, 0]
    for number, line in enumerate((tmp_path / "out.jsonl").read_text().splitlines()):
        result = json.loads(line)
        if number == poison:
            assert result["response"]["status_code"] == 500
        else:
            assert answer(result) == expected(lines[number].rstrip(b"\n"), ToyFamily(vocab_size=30))
