"""`mtp-jax doctor`: what this machine has and what works on it."""

import os
import sys
from argparse import Namespace

import jax

from kernels_pallas.paged_attention import BACKENDS, select_backend
from mtp_jax.bench.environment import versions
from mtp_jax.checkpoints import bundled_names, bundled_path
from mtp_jax.cli.options import Parser
from mtp_jax.cli.start import compile_cache_folder


def add_options(parser: Parser) -> None:
    """It takes none of its own."""


def run(options: Namespace) -> None:  # noqa: ARG001
    """One fact a line, to stdout."""
    facts = [
        *versions().items(),
        ("executable", sys.executable),
        ("cpu cores", str(os.cpu_count())),
        *((f"device {device.id}", f"{device.platform}, {device.device_kind}") for device in jax.devices()),
        ("attention backends", ", ".join(BACKENDS)),
        ("attention backend by default", select_backend("auto", jax.default_backend())),
        ("compiled programs are kept in", str(compile_cache_folder())),
        *(("bundled model", f"{name}, in {bundled_path(name)}") for name in bundled_names()),
    ]
    if not bundled_names():
        facts.append(("bundled model", "NONE FOUND: this installation is incomplete"))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {value}")
