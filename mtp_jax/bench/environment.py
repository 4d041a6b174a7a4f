"""What a measurement was made on."""

import os
import platform
from importlib import metadata

LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of this project, Python and the libraries that decide speed or numbers."""
    return {
        "mtp-jax": version_of("mtp-jax"),
        "python": platform.python_version(),
        **{library: version_of(library) for library in LIBRARIES},
    }


def chip() -> str:
    """What jax computes on by default, and how many of it: "x86_64 cpu, 2 cores" or "NVIDIA H200 x 1"."""
    import jax  # here, so that versions can be asked without starting jax

    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{platform.machine()} cpu, {os.cpu_count()} cores"
    return f"{devices[0].device_kind} x {len(devices)}"


def version_of(distribution: str) -> str:
    """The installed version of a distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
