"""Speed of 1, 2 and 4 independent processes on one machine, as ratios: printed, never judged."""

import json
import time
from pathlib import Path

import pytest

from tests.batch.test_run import results_of
from tests.batch.toy_job import good_line
from tests.batch.toy_processes import ToyProcesses


@pytest.mark.long
def test_throughput_of_several_processes(tmp_path: Path) -> None:
    """From the moment that every engine has started until the last share has ended."""
    lines = [good_line(number, max_tokens=19) for number in range(3000)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    speeds = {}
    for num_processes in (1, 2, 4):
        folder = tmp_path / f"{num_processes}"
        folder.mkdir()
        with ToyProcesses(tmp_path / "in.jsonl", folder / "out.jsonl", num_processes, events=folder) as job:
            job.start_all()
            job.wait()
        assert len(results_of(folder / "out.jsonl")) == len(lines)
        started, ended, num_tokens = [], [], 0
        for log in folder.glob("events-*.jsonl"):
            events = [json.loads(line) for line in log.read_text().splitlines()]
            started += [event["clock_s"] for event in events if event["event"] == "engine_started"]
            ended.append(events[-1]["clock_s"])
            num_tokens += events[-1]["num_completion_tokens"]
        assert len(started) == len(ended) == num_processes
        speeds[num_processes] = num_tokens / (max(ended) - min(started))
    print({count: f"{speed:.0f} tokens/s, {speed / speeds[1]:.2f}x" for count, speed in speeds.items()}, time.ctime())
