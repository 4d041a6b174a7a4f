"""The GPU of a benchmark: one process at a time, and how long its kernels take."""

import fcntl
import glob
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

_REPEATS = 20  # programs launched back to back: the wait for the last one is a hundredth of them


class Gpu:
    """The GPU, for one process at a time. A process that stays too long is ended by its own alarm.

    45 seconds are longer than any case takes: what is still on the GPU then, hangs.
    """

    def __init__(self, path: str, seconds: int = 45):
        self.path, self.seconds = path, seconds

    def __enter__(self) -> "Gpu":
        self.file = open(self.path, "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        signal.alarm(self.seconds)
        return self

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        self.file.close()


def median_time(call: Callable[[], Any], groups: int = 5, warm: int = 2) -> float:
    """Seconds that a call of a compiled program takes, many of them in a row, by the host's clock."""
    import jax

    for _ in range(warm):
        jax.block_until_ready(call())
    times = []
    for _ in range(groups):
        start = time.perf_counter()
        for _ in range(_REPEATS):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / _REPEATS)
    return statistics.median(times)


def device_times(call: Callable[[], Any], num_calls: int, groups: int = 3) -> dict[str, float]:
    """Microseconds a call, kernel by kernel, from the profiler: of `groups` profiles the one with the median sum.

    `call` runs a program that holds `num_calls` of them.
    """
    profiles = sorted((_profile(call, num_calls) for _ in range(groups)), key=lambda times: sum(times.values()))
    return profiles[groups // 2]


def _profile(call: Callable[[], Any], num_calls: int) -> dict[str, float]:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        totals: dict[str, float] = {}
        for plane in jax.profiler.ProfileData.from_file(file).planes:
            if "/device:GPU" not in plane.name:
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    totals[event.name[:40]] = totals.get(event.name[:40], 0.0) + event.duration_ns / 1e3
    return {name: round(us / num_calls, 2) for name, us in sorted(totals.items(), key=lambda kv: -kv[1])}
