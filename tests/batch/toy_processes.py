"""A toy job in processes of its own, to be killed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import jax

# pyright: reportAttributeAccessIssue=false
from tests.architecture.repository import ROOT


class ToyProcesses:
    """`num_processes` of one job, each on `num_devices` fake devices; whatever still runs at the end is killed.

    `events`: a folder for their event logs.
    """

    def __init__(
        self, source: Path, output: Path, num_processes: int, *, num_devices: int = 1, events: Path | None = None
    ) -> None:
        self._events = events
        self.output = output
        self.parts = output.with_name(output.name + ".parts")
        self.errors = output.with_name("errors.txt")
        self._command = [sys.executable, "-m", "tests.batch.toy_job", str(source), str(output)]
        self._num_processes = num_processes
        self._environment = os.environ | {
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "NPROC": "8",
            # As in conftest: they start many times, and compile the same programs each time.
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
            "JAX_COMPILATION_CACHE_MAX_SIZE": str(jax.config.jax_compilation_cache_max_size),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self._running)))
        self.errors.unlink(missing_ok=True)

    def start_all(self) -> None:
        """All of them, as a scheduler would after a failure."""
        self._running = []
        for process in range(self._num_processes):
            command = [*self._command, str(process), str(self._num_processes)]
            command += [] if self._events is None else [str(self._events / f"events-{process}.jsonl")]
            with self.errors.open("ab") as errors:
                started = subprocess.Popen(command, cwd=ROOT, env=self._environment, stderr=errors)
            self._running.append(started)

    def wait_for_parts(self, count: int) -> None:
        """Until so many parts were added, or all processes have ended."""
        seen = self._num_parts()
        while any(process.poll() is None for process in self._running) and self._num_parts() < seen + count:
            time.sleep(0.02)

    def wait_for_end_of(self, count: int) -> None:
        """Until so many shares have come to their end, or all processes have."""
        while any(process.poll() is None for process in self._running) and len([*self.parts.glob("done-*")]) < count:
            time.sleep(0.002)

    def kill(self, which: Iterable[int]) -> None:
        """At once, as by `kill -9`."""
        for process in which:
            self._running[process].kill()
            self._running[process].wait()

    def wait(self) -> None:
        """For those that were not killed; their status must be 0."""
        for process in self._running:
            status = process.wait()
            assert status in (0, -9), self.errors.read_text()[-3000:]

    def _num_parts(self) -> int:
        return len([*self.parts.glob("part-*.jsonl")])
