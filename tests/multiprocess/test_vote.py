"""Several operating-system processes, each with its own requests, launch the same programs in the same order.

The build without the reduction shows that the tests would notice: it hangs, and the collective's time limit ends it.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.child import HEARTBEAT_S

_ROOT = Path(__file__).parents[2]
_COLLECTIVE_TIMEOUT_S = 8


@dataclass(frozen=True)
class Ended:
    """A process that ended: its exit status (None: it had to be killed) and what it wrote."""

    status: int | None
    output: str
    errors: str


def run_processes(num_processes: int, *, limit_s: float, **options: Any) -> list[Ended]:
    """The processes, ended or killed after `limit_s`; `options` are those of `tests.multiprocess.child`."""
    with started(num_processes, **options) as processes:
        deadline = time.monotonic() + limit_s
        for process, _, _ in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        return [Ended(process.poll(), output.read_text(), errors.read_text()) for process, output, errors in processes]


@contextlib.contextmanager
def started(num_processes: int, **options: Any) -> Iterator[list[tuple[subprocess.Popen[bytes], Path, Path]]]:
    """The processes and the files they write to. Killed at the end: jax catches the gentler signal."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_timeout_seconds={_COLLECTIVE_TIMEOUT_S}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(_ROOT),
        "NPROC": "8",  # as in conftest
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(num_processes):
                told = json.dumps({**options, "process": index, "num_processes": num_processes, "port": port})
                files = Path(folder) / f"{index}.out", Path(folder) / f"{index}.err"
                with files[0].open("wb") as output, files[1].open("wb") as errors:
                    command = [sys.executable, "-m", "tests.multiprocess.child", told]
                    process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=output, stderr=errors)
                processes.append((process, *files))
            yield processes
        finally:
            for process, _, _ in processes:
                process.kill()
                process.wait()


def assert_all_right(processes: Sequence[Ended], num_schedules: int) -> None:
    for process in processes:
        assert process.status == 0, process.errors[-3000:]
        lines = process.output.splitlines()
        assert lines[-1] == "all right"
        assert sum("right:" in line for line in lines) == num_schedules


LOOKUP_FIRST = {"method": "ngram_mtp", "prompt_lookup_min": 2}


@pytest.mark.parametrize(
    ("mesh", "drafting"),
    [((2, 1), LOOKUP_FIRST), ((1, 2), {})],
    ids=["a data shard each, prompt lookup first", "one data shard for both"],
)
def test_b21_two_processes_finish_near_limit_schedules(mesh: tuple[int, int], drafting: dict[str, Any]) -> None:
    """Unequal, empty and late ranks; each request's tokens are plain decoding's, and its drafts what its text says."""
    ended = run_processes(
        2, local_devices=1, mesh=mesh, drafting=drafting, case="schedules", schedules=(0, 20), limit_s=240
    )
    assert_all_right(ended, 20)


def test_generate_is_collective_and_each_process_gets_its_own() -> None:
    ended = run_processes(2, local_devices=1, mesh=(2, 1), case="generate", schedules=(0, 0), limit_s=180)
    assert_all_right(ended, 3)


def test_b02_without_the_reduction_the_same_schedules_do_not_finish() -> None:
    ended = run_processes(2, local_devices=1, mesh=(2, 1), case="no reduction", schedules=(0, 40), limit_s=120)
    # The processes launch different programs: a collective waits in vain until its time limit, or for good.
    has_hung = any(process.status is None for process in ended)
    assert has_hung or any("EngineFailed: A step failed on a device" in process.errors for process in ended)
    assert not any(process.output.endswith("all right\n") for process in ended)


def test_processes_that_are_unlike_are_told_in_what() -> None:
    ended = run_processes(2, local_devices=1, mesh=(2, 1), case="unlike", schedules=(0, 1), limit_s=120)
    for process in ended:
        assert process.status == 0, process.errors[-3000:]
        told = [line for line in process.output.splitlines() if line.startswith("refused: ")]
        assert len(told) == 4
        assert told[0].startswith("refused: max_num_seqs differs between processes: 2 in process 0, 4 in process 1")
        assert told[1].startswith(
            "refused: speculative.near_limit differs between processes: 'row_cap' in process 0, 'group_zero' in process"
        )
        assert all(line.startswith("refused: weights differs between processes: ") for line in told[2:])


def test_when_a_process_dies_the_others_stop() -> None:
    """Within the heartbeat's time limit, or the collective's, whichever is noticed first."""
    with started(2, local_devices=1, mesh=(2, 1), case="death", schedules=(0, 1)) as processes:
        assert processes[1][0].wait(timeout=120) == 9
        assert processes[0][0].wait(timeout=3 * (HEARTBEAT_S + _COLLECTIVE_TIMEOUT_S)) != 0
        finished = [line for line in processes[0][1].read_text().splitlines() if "right:" in line]
        assert len(finished) >= 3  # what was finished before had been handed over


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_processes", "local_devices", "mesh"),
    [(2, 1, (2, 1)), (2, 2, (4, 1)), (2, 2, (2, 2)), (4, 1, (4, 1)), (4, 1, (2, 2)), (4, 2, (4, 2)), (2, 2, (1, 4))],
)
def test_five_hundred_near_limit_schedules(num_processes: int, local_devices: int, mesh: tuple[int, int]) -> None:
    ended = run_processes(
        num_processes,
        local_devices=local_devices,
        mesh=mesh,
        case="schedules",
        schedules=(0, 500),
        slots_per_shard=2,
        limit_s=1800,
    )
    assert_all_right(ended, 500)
