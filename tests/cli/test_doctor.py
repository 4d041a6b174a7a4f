"""`mtp-jax doctor`: the machine as it is, and one sentence of advice for each common misconfiguration."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from mtp_jax.checkpoints import bundled_path
from mtp_jax.cli import doctor
from mtp_jax.cli.diagnosis import Machine, accelerator_files, advice
from mtp_jax.cli.main import main

SOUND = Machine(platform="gpu", num_devices=1, jax_version="0.11.2", free_bytes_of_host=2**36)

AMISS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"num_models": 0}, "Install the project anew".lower()),
    "damaged model": ({"damaged_models": {"tiny-mtp": "model.bin is missing."}}, "model.bin is missing"),
    "GPU unused": ({"platform": "cpu", "accelerator_files": ("/dev/nvidia0",)}, 'install the extra "cuda13"'),
    "TPU unused": ({"platform": "cpu", "accelerator_files": ("/dev/accel0",)}, 'install the extra "tpu"'),
    "GPU turned off": (
        {"platform": "cpu", "accelerator_files": ("/dev/nvidia0",), "environment": {"JAX_PLATFORMS": "cpu"}},
        "JAX_PLATFORMS is 'cpu': unset it",
    ),
    "untested jax": ({"jax_version": "0.12.1"}, "jax is 0.12.1 and tests run on 0.10 and 0.11"),
    "no jit": ({"environment": {"JAX_DISABLE_JIT": "True"}}, "JAX_DISABLE_JIT is on"),
    "NaN checks": ({"environment": {"JAX_DEBUG_NANS": "1"}}, "JAX_DEBUG_NANS is on"),
    "64 bits": ({"environment": {"JAX_ENABLE_X64": "true"}}, "JAX_ENABLE_X64 is on"),
    "no preallocation": ({"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}, "unless you share the card"),
    "little memory": ({"free_bytes_of_host": 2**30}, "The host has 1.0 GiB of memory left"),
    "cache not writable": ({"is_cache_writable": False}, "set JAX_COMPILATION_CACHE_DIR"),
    "full disk": ({"free_bytes_of_cache": 2**29}, "has 0.5 GiB of disk left"),
    "fake devices, few threads": ({"platform": "cpu", "num_devices": 8}, "8 CPU devices need NPROC=16"),
    "Slurm": ({"environment": {"SLURM_NTASKS": "4"}}, "Slurm started 4 processes"),
    "TPU pod": ({"environment": {"TPU_WORKER_HOSTNAMES": "a,b"}}, "Cloud TPU started 2 processes"),
}


@pytest.mark.parametrize(("changes", "sentence"), AMISS.values(), ids=AMISS)
def test_each_misconfiguration_gets_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    found = advice(replace(SOUND, **changes))
    assert len(found) == 1
    assert sentence in found[0].sentence
    assert found[0].is_error == ("model" in sentence or "project" in sentence)


@pytest.mark.parametrize(
    "machine",
    [
        SOUND,
        replace(SOUND, platform="cpu", num_devices=8, environment={"NPROC": "16"}),
        replace(SOUND, num_processes=4, environment={"SLURM_NTASKS": "4"}),
        replace(SOUND, environment={"JAX_DISABLE_JIT": "0", "SLURM_NTASKS": "1"}),
    ],
)
def test_a_sound_machine_gets_none(machine: Machine) -> None:
    assert advice(machine) == []


def test_drivers_are_seen_in_dev(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidiactl", "accel0", "null"):
        (tmp_path / name).touch()
    assert [Path(file).name for file in accelerator_files(tmp_path)] == ["nvidia0", "accel0"]


def test_the_report_is_also_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["jax"] == jax.__version__
    assert [device["id"] for device in report["devices"]] == [device.id for device in jax.devices()]
    assert report["bundled_models"] == {"tiny-mtp": None}
    assert report["attention_backends"]["reference"] == {"GQA, bfloat16": None, "MLA, bfloat16": None}
    assert report["linear_backends"]["xla"] is None
    assert "needs a GPU" in report["linear_backends"]["mosaic_gpu"]
    assert "needs a TPU" in report["attention_backends"]["mosaic_tpu"]["GQA, bfloat16"]
    assert not any(found["is_error"] for found in report["advice"])


def test_a_damaged_model_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny-mtp"
    shutil.copytree(bundled_path("tiny-mtp"), folder)
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    monkeypatch.setattr(doctor, "bundled_path", lambda name: tmp_path / name)
    assert main(["doctor"]) == 2
    printed = capsys.readouterr()
    assert "is damaged: its SHA-256 is not the saved one" in printed.err
    assert "Advice:" in printed.out


def test_a_gpu_of_another_kind_is_named() -> None:
    class Ada:
        platform, compute_capability = "gpu", "8.9"

    assert doctor._here("mosaic_gpu", Ada()) == "needs compute capability 9.0, and this GPU has 8.9"
    assert doctor._here("reference", Ada()) is None
