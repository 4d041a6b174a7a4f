"""`mtp-jax doctor`: what this machine has, what works on it, and what is likely not as its user wants it."""

import json
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax

from kernels_pallas.grouped_matmul.api import BACKENDS as EXPERT_BACKENDS
from kernels_pallas.grouped_matmul.contract import Problem as ExpertProblem
from kernels_pallas.paged_attention import BACKENDS, select_backend
from kernels_pallas.paged_attention.contract import Problem
from kernels_pallas.streamed_linear.api import BACKENDS as LINEAR_BACKENDS
from kernels_pallas.streamed_linear.contract import PLAIN
from kernels_pallas.streamed_linear.contract import Problem as LinearProblem
from mtp_jax.bench.environment import version_of, versions
from mtp_jax.checkpoints import CheckpointError, bundled_names, bundled_path
from mtp_jax.checkpoints.manifest import Manifest
from mtp_jax.cli.diagnosis import Machine, accelerator_files, advice, watched_environment
from mtp_jax.cli.options import Parser
from mtp_jax.cli.start import compile_cache_folder
from mtp_jax.core.errors import ConfigError

EXTRAS = {
    "gguf": "gguf",
    "gcs": "gcsfs",
    "metrics": "prometheus-client",
    "notebooks": "jupytext",
    "plot": "matplotlib",
    "test": "hypothesis",
}
"""Extra, and a distribution that it brings."""
_GIB = 2**30
_HOPPER = "9.0"
_ATTENTION = {
    "GQA, bfloat16": Problem(64, 4, 32, 8, 128, 128, 64, 64, "bfloat16", is_latent=False, has_ancestor_bits=False),
    "MLA, bfloat16": Problem(64, 4, 16, 1, 576, 512, 64, 64, "bfloat16", is_latent=True, has_ancestor_bits=False),
}
"""What backends are asked about: 64 requests, four rows each, pages of 64."""
_LINEAR = LinearProblem(num_rows=8, in_channels=2048, out_channels=8192, dtype="bfloat16", form=PLAIN)
_EXPERTS = ExpertProblem(num_rows=64, num_experts=32, in_channels=7168, out_channels=4096, dtype="bfloat16")


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")


def run(options: Namespace) -> None:
    """The report, to stdout. `ConfigError` (exit code 2) if something that was promised does not work here."""
    report = examine()
    print(json.dumps(report, indent=1) if options.json else as_text(report))
    errors = [found["advice"] for found in report["advice"] if found["is_error"]]
    if errors:
        raise ConfigError(" ".join(errors))


def examine() -> dict[str, Any]:
    """Everything that is reported, as JSON holds it."""
    devices, folder = jax.devices(), compile_cache_folder()
    models = _models()
    machine = Machine(
        platform=jax.default_backend(),
        num_devices=len(devices),
        jax_version=jax.__version__,
        environment=watched_environment(),
        accelerator_files=accelerator_files(),
        num_processes=jax.process_count(),
        cache_folder=folder,
        is_cache_writable=_is_writable(folder),
        free_bytes_of_cache=shutil.disk_usage(_existing(folder)).free,
        free_bytes_of_host=_free_host_bytes(),
        damaged_models={name: found for name, found in models.items() if found is not None},
        num_models=len(models),
    )
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return {
        "versions": versions(),
        "extras": {extra: version_of(package) for extra, package in EXTRAS.items()},
        "python": sys.executable,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "free_memory_gib": None if (free := machine.free_bytes_of_host) is None else round(free / _GIB, 1),
        "devices": [_device(device) for device in devices],
        "processes": machine.num_processes,
        "attention_backends": {name: _attention(name, devices[0]) for name in BACKENDS},
        "attention_backend_auto": select_backend("auto", machine.platform),
        "expert_backends": {
            name: _here(name, devices[0]) or backend.supports(_EXPERTS) for name, backend in EXPERT_BACKENDS.items()
        },
        "linear_backends": {
            name: _here(name, devices[0]) or backend.supports(_LINEAR) for name, backend in LINEAR_BACKENDS.items()
        },
        "compiled_programs": {
            "folder": str(folder),
            "files": len(files),
            "mib": round(sum(file.stat().st_size for file in files) / 2**20, 1),
        },
        "bundled_models": models,
        "environment": dict(machine.environment),
        "advice": [{"advice": found.sentence, "is_error": found.is_error} for found in advice(machine)],
    }


def as_text(report: dict[str, Any]) -> str:
    """One fact a line, and the advice."""
    kept = report["compiled_programs"]
    facts: list[tuple[str, str]] = [
        *report["versions"].items(),
        ("extras", ", ".join(f"{extra}: {found}" for extra, found in report["extras"].items())),
        ("executable", report["python"]),
        ("cpu cores, memory", f"{report['cpu_cores']}, {report['free_memory_gib']} GiB left"),
        *((f"device {device['id']}", _device_line(device)) for device in report["devices"]),
        ("processes", str(report["processes"])),
        *((f"attention backend {name}", _reasons(reasons)) for name, reasons in report["attention_backends"].items()),
        ("attention backend by default", report["attention_backend_auto"]),
        *((f"expert backend {name}", reason or "yes") for name, reason in report["expert_backends"].items()),
        *((f"linear backend {name}", reason or "yes") for name, reason in report["linear_backends"].items()),
        ("compiled programs", f"{kept['files']} files, {kept['mib']} MiB in {kept['folder']}"),
        *((f"bundled model {name}", problem or "whole") for name, problem in report["bundled_models"].items()),
        *((f"${name}", value) for name, value in report["environment"].items()),
    ]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name:<{width}}  {value}" for name, value in facts]
    found = report["advice"]
    lines += ["", "Nothing to advise." if not found else "Advice:"]
    return "\n".join([*lines, *(f"- {one['advice']}" for one in found)])


def _attention(name: str, device: Any) -> dict[str, str | None]:
    """Why the backend cannot do each of `_ATTENTION` here, or None."""
    return {what: _here(name, device) or BACKENDS[name].supports(problem) for what, problem in _ATTENTION.items()}


def _here(name: str, device: Any) -> str | None:
    """Why kernels of this name cannot run on the device: those of Mosaic are made for one kind."""
    if not name.startswith("mosaic_"):
        return None
    wanted = name.removeprefix("mosaic_")
    if wanted != device.platform:
        return f"needs a {wanted.upper()}, and jax computes on a {device.platform.upper()}"
    capability = getattr(device, "compute_capability", _HOPPER)
    return None if capability == _HOPPER else f"needs compute capability {_HOPPER}, and this GPU has {capability}"


def _reasons(by_problem: dict[str, str | None]) -> str:
    """One word or sentence where all problems have the same."""
    each = {problem: reason or "yes" for problem, reason in by_problem.items()}
    if len({*each.values()}) == 1:
        return next(iter(each.values()))
    return "; ".join(f"{problem}: {reason}" for problem, reason in each.items())


def _device(device: Any) -> dict[str, Any]:
    """Of a device: what it is, the slice or host it belongs to, and its memory where jax says."""
    stats = device.memory_stats() or {}
    facts = {"id": device.id, "platform": device.platform, "kind": device.device_kind, "process": device.process_index}
    extras = {name: value for name in ("slice_index", "coords") if (value := getattr(device, name, None)) is not None}
    if "bytes_limit" in stats:
        used = stats.get("bytes_in_use", 0)
        extras |= {
            "gib": round(stats["bytes_limit"] / _GIB, 1),
            "free_gib": round((stats["bytes_limit"] - used) / _GIB, 1),
        }
    return facts | extras


def _device_line(device: dict[str, Any]) -> str:
    more = {name: value for name, value in device.items() if name not in ("id", "platform", "kind")}
    return ", ".join([device["platform"], device["kind"], *(f"{name} {value}" for name, value in more.items())])


def _models() -> dict[str, str | None]:
    """What is wrong with each bundled model, by its manifest; None: nothing."""
    found: dict[str, str | None] = {}
    for name in bundled_names():
        folder = bundled_path(name)
        try:
            Manifest.read(folder).verify_files(folder)
            found[name] = None
        except CheckpointError as error:
            found[name] = str(error)
    return found


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _is_writable(folder: Path) -> bool:
    return os.access(_existing(folder), os.W_OK)


def _free_host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    available = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if available is None else 1024 * int(available.split()[1])
