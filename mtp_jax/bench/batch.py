"""The same file of requests answered by one process, by two, by four: tokens a second, and the same tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_jax.bench.tables import table
from mtp_jax.core.errors import ConfigError, EngineFailed

_LAST_LINES = 5


@dataclass(frozen=True)
class JobSpeed:
    """A job from the moment that its first engine stood until its last process ended."""

    num_processes: int
    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all processes together.

        >>> JobSpeed(num_processes=2, num_tokens=300, seconds=1.5).tokens_per_s
        200.0
        """
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Job:
    """Requests in a file, and the options of `mtp-jax run-batch` in another. Processes run independent engines.

    `num_gpus`: process i is shown GPU i % num_gpus alone; None shows every process what this one sees.
    """

    requests: Path
    options: Path
    num_gpus: int | None = None

    def run(self, folder: Path, num_processes: int) -> JobSpeed:
        """By the command line, as people start it; results and events are left in the folder, which is made.

        Raises `EngineFailed`, with the end of what it wrote, where a process fails.
        """
        folder.mkdir()
        running = [self._start(folder, index, num_processes) for index in range(num_processes)]
        failed = [index for index, process in enumerate(running) if process.wait()]
        if failed:
            said = _messages(folder, failed[0]).read_text().splitlines()[-_LAST_LINES:]
            raise EngineFailed(f"Process {failed[0]} of {num_processes} failed: {' / '.join(said)}")
        return _speed(folder, num_processes)

    def _start(self, folder: Path, index: int, num_processes: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mtp_jax.cli", "run-batch", "--config", str(self.options)]
        command += [
            "-i",
            str(self.requests),
            "-o",
            str(results_in(folder)),
            "--event-log",
            str(folder / "events.jsonl"),
        ]
        command += ["--process-id", str(index), "--num-processes", str(num_processes)]
        environment = dict(os.environ)
        if self.num_gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(index % self.num_gpus)
        with _messages(folder, index).open("wb") as messages:
            return subprocess.Popen(command, env=environment, stdout=messages, stderr=messages)


def results_in(folder: Path) -> Path:
    """Where `Job.run` leaves the results."""
    return folder / "results.jsonl"


def request_lines(prompts: Sequence[Sequence[int]], *, max_tokens: int) -> bytes:
    """A greedy request for each prompt, all of the same length."""
    lines: list[dict[str, Any]] = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        }
        for number, prompt in enumerate(prompts)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def tokens_in(results: Path) -> list[tuple[int, ...]]:
    """Token ids by request, in the order of the file; `ConfigError` for one that was not answered."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        if line["error"] is not None:
            raise ConfigError(f"request {line['custom_id']} was not answered: {line['error']['message']}")
    return [tuple(line["response"]["body"]["choices"][0]["token_ids"]) for line in lines]


def as_text(speeds: Sequence[JobSpeed]) -> str:
    """A table, against the first.

    >>> print(as_text([JobSpeed(1, 100, 1.0), JobSpeed(2, 100, 0.625)]))
    processes  tokens/s      x
    1               100  1.00x
    2               160  1.60x
    """
    first = speeds[0].tokens_per_s
    rows = [[str(one.num_processes), f"{one.tokens_per_s:.0f}", f"{one.tokens_per_s / first:.2f}x"] for one in speeds]
    return table([["processes", "tokens/s", "x"], *rows])


def _messages(folder: Path, index: int) -> Path:
    return folder / f"messages-{index}.txt"


def _speed(folder: Path, num_processes: int) -> JobSpeed:
    started: list[float] = []
    ended: list[float] = []
    num_tokens = 0
    for log in sorted(folder.glob("events*.jsonl")):
        events: list[Mapping[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
        started += [event["clock_s"] for event in events if event["event"] == "engine_started"]
        ended.append(events[-1]["clock_s"])
        num_tokens += events[-1]["num_completion_tokens"]
    return JobSpeed(num_processes, num_tokens, max(ended) - min(started))
