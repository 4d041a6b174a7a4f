"""What the device did during a few steps, from `jax.profiler`: kernels, gaps, launches by the host."""

import glob
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

_HOST_CALLS = (
    "cuGraph",
    "cuLaunch",
    "cuMemcpy",
    "cuStreamSync",
    "cuEventSync",
    "cudaGraph",
    "cudaLaunch",
    "cudaMemcpy",
)


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on a stream of the device, in nanoseconds."""

    name: str
    start_ns: float
    duration_ns: float


@dataclass(frozen=True)
class Profile:
    """Of one step, on average. `between_steps_ms` is the part of `idle_ms` in the longest gaps, one a step."""

    num_kernels: float
    busy_ms: float
    span_ms: float
    between_steps_ms: float
    kernels: tuple[tuple[str, float, float], ...]  # name, how many, microseconds; the longest in all first
    host_calls: dict[str, float] = field(default_factory=dict[str, float])  # of the driver, how many

    @property
    def idle_ms(self) -> float:
        """In which no kernel ran."""
        return self.span_ms - self.busy_ms

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "kernels_per_step": round(self.num_kernels, 1),
            "busy_ms": round(self.busy_ms, 4),
            "span_ms": round(self.span_ms, 4),
            "idle_share": round(self.idle_ms / self.span_ms, 4),
            "idle_between_steps_share": round(self.between_steps_ms / self.span_ms, 4),
            "top_kernels": [[name, round(count, 2), round(us, 1)] for name, count, us in self.kernels],
            "host_calls_per_step": {name: round(count, 2) for name, count in self.host_calls.items()},
        }


def profile_of(kernels: Sequence[Kernel], num_steps: int, num_listed: int = 24) -> Profile:
    """The profile of `num_steps` steps in which these ran.

    >>> kernels = [Kernel("a", 0, 60), Kernel("b", 50, 40), Kernel("a", 100, 60), Kernel("b", 160, 30)]
    >>> profile = profile_of(kernels, num_steps=2)
    >>> profile.num_kernels, profile.busy_ms, profile.span_ms, profile.between_steps_ms
    (2.0, 9e-05, 9.5e-05, 5e-06)
    """
    gaps: list[float] = []
    busy = 0.0
    ordered = sorted(kernels, key=lambda kernel: kernel.start_ns)
    end = ordered[0].start_ns
    for kernel in ordered:
        if kernel.start_ns > end:
            gaps.append(kernel.start_ns - end)
            end = kernel.start_ns
        busy += max(kernel.start_ns + kernel.duration_ns - end, 0.0)
        end = max(end, kernel.start_ns + kernel.duration_ns)
    between = sum(sorted(gaps, reverse=True)[: num_steps - 1])
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in ordered:
        totals[kernel.name] += kernel.duration_ns  # type: ignore[assignment]
        counts[kernel.name] += 1
    return Profile(
        num_kernels=len(ordered) / num_steps,
        busy_ms=busy / num_steps / 1e6,
        span_ms=(end - ordered[0].start_ns) / num_steps / 1e6,
        between_steps_ms=between / num_steps / 1e6,
        kernels=tuple(
            (name, counts[name] / num_steps, total / num_steps / 1e3) for name, total in totals.most_common(num_listed)
        ),
    )


def profiled(steps: Callable[[], object], num_steps: int) -> Profile | None:
    """Runs `steps` under the profiler. None where the device's kernels are not in the profile, as on a CPU."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            steps()
        [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        kernels, host_calls = _read(file)
    if not kernels:
        return None
    found = profile_of(kernels, num_steps)
    found.host_calls.update({name: count / num_steps for name, count in host_calls.most_common(12)})
    return found


def _read(file: str) -> tuple[list[Kernel], Counter[str]]:
    kernels: list[Kernel] = []
    host_calls: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        is_device = "/device:GPU" in plane.name
        for line in plane.lines:
            if is_device and line.name.startswith("Stream"):
                kernels += [Kernel(event.name, event.start_ns, event.duration_ns) for event in line.events]
            elif not is_device:
                host_calls.update(event.name for event in line.events if event.name.startswith(_HOST_CALLS))
    return kernels, host_calls
