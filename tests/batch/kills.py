"""The bundled model's job, by the command line, in processes that are killed again and again.

python -m tests.batch.kills FOLDER NUM_REQUESTS NUM_KILLS [SECONDS]

Of all processes or of one; while they start, at work, while a part is written, while results are merged. SECONDS: after
so many nobody is killed any more, and what was reached is told. Results are compared with those of a run that nobody
disturbed.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.architecture.repository import ROOT

NUM_PROCESSES, NUM_DEVICES = 4, 2
MOMENTS = ("starting", "at work", "at work", "writing", "writing")
OPTIONS = [
    *("--model", "tiny-mtp", "--policy", "fixed", "--num-speculative-tokens", "2"),
    *("--max-num-seqs", "2", "--max-model-len", "32"),
]


def request_lines(count: int) -> list[bytes]:
    """Requests that differ, every third one drawn."""
    lines: list[bytes] = []
    for number in range(count):
        dice = random.Random(number)
        body = {
            "prompt": [dice.randrange(100, 4000) for _ in range(dice.randrange(1, 14))],
            "max_tokens": dice.randrange(2, 14),
            "temperature": 0.8 if number % 3 == 0 else 0.0,
        }
        line = {"custom_id": f"request-{number}", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode() + b"\n")
    return lines


def tokens_of(output: Path) -> list[list[int]]:
    """Of every result, in order; a result that is none fails here."""
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [f"request-{number}" for number in range(len(results))]
    return [result["response"]["body"]["choices"][0]["token_ids"] for result in results]


class Job:
    """One job of a folder, to be started and killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "out.jsonl"
        self.parts = folder / "out.jsonl.parts"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, output: Path, *more: str) -> subprocess.Popen[bytes]:
        """One process."""
        source = ["-i", str(self.folder / "in.jsonl"), "-o", str(output)]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES),
            "NPROC": "8",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",  # they start many times
        }
        command = [sys.executable, "-m", "mtp_jax.cli", "run-batch", *source, *OPTIONS, *more]
        with (self.folder / "errors.txt").open("ab") as errors:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=errors, stderr=errors)

    @contextmanager
    def processes(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """All of them; those that still run at the end are killed."""
        running = [
            self.start(self.output, "--resume", "--process-id", str(index), "--num-processes", str(NUM_PROCESSES))
            for index in range(NUM_PROCESSES)
        ]
        try:
            yield running
        finally:
            for process in running:
                process.kill()
                process.wait()

    def num_parts(self) -> int:
        """Parts that are whole."""
        return len([*self.parts.glob("part-*")])

    def is_at(self, moment: str, num_parts_before: int) -> bool:
        """Whether the processes have come so far."""
        if moment == "writing":
            return any(self.parts.glob(".part-*.partial"))
        if moment == "merging":
            return any(self.parts.glob(".out.jsonl.*.partial"))
        return moment == "starting" or self.num_parts() > num_parts_before


def kill_and_go_on(folder: Path, num_requests: int, num_kills: int, limit_s: float = float("inf")) -> Counter[str]:
    """Kills by moment; raises `AssertionError` where results are not those of an undisturbed run."""
    job, dice, kills = Job(folder), random.Random(0), Counter[str]()
    (folder / "in.jsonl").write_bytes(b"".join(request_lines(num_requests)))
    undisturbed = folder / "undisturbed.jsonl"
    assert job.start(undisturbed, "--mesh", f"data={NUM_DEVICES}").wait() == 0, (folder / "errors.txt").read_text()
    began = time.monotonic()
    while kills.total() < num_kills and time.monotonic() - began < limit_s and not job.output.exists():
        are_all_done = len([*job.parts.glob("done-*")]) == NUM_PROCESSES
        moment = "merging" if are_all_done or kills.total() > 0.8 * num_kills else dice.choice(MOMENTS)
        with job.processes() as running:
            before = job.num_parts()
            while not job.is_at(moment, before) and any(process.poll() is None for process in running):
                time.sleep(0.001)
            if moment in ("starting", "at work"):
                time.sleep(dice.uniform(0, 3))
            if moment != "merging" and dice.random() < 0.4:
                running[dice.randrange(NUM_PROCESSES)].kill()
                kills[f"{moment}, one"] += 1
                time.sleep(dice.uniform(0, 5))
            kills[f"{moment}, all"] += 1
        print(f"{time.monotonic() - began:.0f} s: {dict(kills)}, {job.num_parts()} parts", flush=True)
    with job.processes() as running:
        assert [process.wait() for process in running] == [0] * NUM_PROCESSES, (folder / "errors.txt").read_text()
    assert tokens_of(job.output) == tokens_of(undisturbed)
    assert len(tokens_of(job.output)) == num_requests
    assert not job.parts.exists()
    return kills


if __name__ == "__main__":
    folder, num_requests, num_kills, *limit_s = sys.argv[1:]
    Path(folder).mkdir(parents=True)
    print(kill_and_go_on(Path(folder), int(num_requests), int(num_kills), *map(float, limit_s)))
