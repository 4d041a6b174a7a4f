"""Common misconfigurations: what of this machine and its environment is likely not what its user wants, and what to do.

`Machine` is all that is looked at, so that each piece of advice can be tried without the machine that needs it.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TESTED_JAX = ("0.10", "0.11")
"""Minor versions of jax that the tests run on."""
CLUSTERS = {
    "Slurm": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "MPI (PMI)": "PMI_SIZE",
    "Cloud TPU": "TPU_WORKER_HOSTNAMES",
    "Kubernetes job": "JOB_COMPLETION_INDEX",
}
"""By cluster: a variable that it sets for each of its processes."""
WATCHED = (
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEBUG_NANS",
    "JAX_DISABLE_JIT",
    "JAX_ENABLE_X64",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "LIBTPU_INIT_ARGS",
    "CUDA_VISIBLE_DEVICES",
    "NPROC",
    *CLUSTERS.values(),
)
"""Variables of the environment that change what jax does, or that say there are other processes."""
_GIB = 2**30
_LEAST_ROOM = _GIB
_ON = re.compile(r"1|true|yes|on|y|t", re.IGNORECASE)


@dataclass(frozen=True)
class Machine:
    """What the advice depends on."""

    platform: str  # that jax computes on by default
    num_devices: int
    jax_version: str
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    accelerator_files: tuple[str, ...] = ()  # of drivers: "/dev/nvidia0", "/dev/accel0"
    num_processes: int = 1
    cache_folder: Path = Path()
    is_cache_writable: bool = True
    free_bytes_of_cache: int | None = None
    free_bytes_of_host: int | None = None
    damaged_models: Mapping[str, str] = field(default_factory=dict[str, str])  # what is wrong, by name
    num_models: int = 1

    def is_on(self, name: str) -> bool:
        """Whether a variable of the environment is set and says yes."""
        return _ON.fullmatch(self.environment.get(name, "")) is not None


@dataclass(frozen=True)
class Advice:
    """One sentence: what is found, and what to do. `is_error`: something that was promised does not work."""

    sentence: str
    is_error: bool = False


def advice(machine: Machine) -> list[Advice]:
    """All that there is to say, in the order of `_CHECKS`."""
    return [found for check in _CHECKS for found in check(machine)]


def _models(machine: Machine) -> Iterator[Advice]:
    if machine.num_models == 0:
        yield Advice("No bundled model was found: install the project anew, from a whole checkout or wheel.", True)
    for name, problem in machine.damaged_models.items():
        yield Advice(f"The bundled model {name!r} is damaged ({problem}) Install the project anew.", True)


def _accelerators(machine: Machine) -> Iterator[Advice]:
    if machine.platform != "cpu" or not machine.accelerator_files:
        return
    file = machine.accelerator_files[0]
    kind, extra = ("GPU", "cuda13") if "nvidia" in file else ("TPU", "tpu")
    chosen = machine.environment.get("JAX_PLATFORMS")
    if chosen:
        yield Advice(f"There is a {kind} ({file}) and JAX_PLATFORMS is {chosen!r}: unset it to compute on the {kind}.")
    else:
        yield Advice(f'There is a {kind} ({file}) and jax computes on the CPU: install the extra "{extra}".')


def _versions(machine: Machine) -> Iterator[Advice]:
    if not machine.jax_version.startswith(tuple(f"{minor}." for minor in TESTED_JAX)):
        tested = " and ".join(TESTED_JAX)
        yield Advice(f"jax is {machine.jax_version} and tests run on {tested}: install with -c constraints.txt.")


def _debugging(machine: Machine) -> Iterator[Advice]:
    if machine.is_on("JAX_DISABLE_JIT"):
        yield Advice("JAX_DISABLE_JIT is on: every step runs op by op, hundreds of times slower; unset it.")
    if machine.is_on("JAX_DEBUG_NANS"):
        yield Advice("JAX_DEBUG_NANS is on: programs run twice, and pages that nobody reads may hold NaN; unset it.")
    if machine.is_on("JAX_ENABLE_X64"):
        yield Advice("JAX_ENABLE_X64 is on: the engine's programs are tested in 32 bits only; unset it.")


def _memory(machine: Machine) -> Iterator[Advice]:
    if machine.platform == "gpu" and machine.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() == "false":
        yield Advice(
            "XLA_PYTHON_CLIENT_PREALLOCATE is false: a batch may fail late, for memory that others took; unset it "
            "unless you share the card."
        )
    if machine.free_bytes_of_host is not None and machine.free_bytes_of_host < 2 * _LEAST_ROOM:
        free = machine.free_bytes_of_host / _GIB
        yield Advice(f"The host has {free:.1f} GiB of memory left and compiling takes about 2 GiB: free some first.")


def _cache(machine: Machine) -> Iterator[Advice]:
    folder = machine.cache_folder
    if not machine.is_cache_writable:
        yield Advice(
            f"{folder} cannot be written, so every start compiles anew: set JAX_COMPILATION_CACHE_DIR to a folder of "
            "yours."
        )
    elif machine.free_bytes_of_cache is not None and machine.free_bytes_of_cache < _LEAST_ROOM:
        free = machine.free_bytes_of_cache / _GIB
        yield Advice(f"{folder}, for compiled programs, has {free:.1f} GiB of disk left: free some, or choose another.")


def _fake_devices(machine: Machine) -> Iterator[Advice]:
    if machine.platform != "cpu" or machine.num_devices < 2:
        return
    wanted, nproc = 2 * machine.num_devices, machine.environment.get("NPROC", "")
    if not nproc.isdecimal() or int(nproc) < wanted:
        yield Advice(
            f"{machine.num_devices} CPU devices need NPROC={wanted} or more: collectives block a thread each, and a "
            "mesh may otherwise wait forever."
        )


def _processes(machine: Machine) -> Iterator[Advice]:
    if machine.num_processes > 1:
        return
    for cluster, variable in CLUSTERS.items():
        value = machine.environment.get(variable, "")
        count = len(value.split(",")) if cluster == "Cloud TPU" and value else int(value) if value.isdecimal() else 1
        if count > 1 and cluster != "Kubernetes job":
            yield Advice(
                f"{cluster} started {count} processes ({variable}), and this one is alone: give run-batch "
                "--distributed."
            )


_CHECKS: tuple[Callable[[Machine], Iterator[Advice]], ...] = (
    _models,
    _accelerators,
    _versions,
    _debugging,
    _memory,
    _cache,
    _fake_devices,
    _processes,
)


def watched_environment() -> dict[str, str]:
    """Those of `WATCHED` that are set."""
    return {name: os.environ[name] for name in WATCHED if name in os.environ}


def accelerator_files(root: Path = Path("/dev")) -> tuple[str, ...]:
    """What drivers of GPUs and TPUs put into /dev."""
    return tuple(str(file) for pattern in ("nvidia[0-9]*", "accel[0-9]*") for file in sorted(root.glob(pattern)))
