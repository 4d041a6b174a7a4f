"""Snapshots of a run: kept, sealed, checked when they are restored, and never half there."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.train.snapshots import Snapshots
from tests.architecture.repository import ROOT
from tests.train.save_forever import state_at


def save(folder: Path, *steps: int) -> None:
    with Snapshots(folder, keep=2) as snapshots:
        for step in steps:
            snapshots.save(step, state_at(step))


def test_the_newest_are_kept_and_restored(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in (tmp_path / "seals").iterdir()) == ["2", "3"]
    with Snapshots(tmp_path, keep=2) as snapshots:
        assert snapshots.latest_step() == 3
        np.testing.assert_array_equal(snapshots.restore(3, state_at(0))["a"], state_at(3)["a"])
        np.testing.assert_array_equal(snapshots.restore(2, state_at(0))["b"], state_at(2)["b"])


def test_one_without_a_seal_does_not_count_and_makes_room(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "seals" / "2" / "manifest.json").unlink()
    (tmp_path / "seals" / "2").rmdir()
    with Snapshots(tmp_path, keep=2) as snapshots:
        assert snapshots.latest_step() == 1
        snapshots.save(2, state_at(2))
    with Snapshots(tmp_path, keep=2) as snapshots:
        assert snapshots.latest_step() == 2


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    largest = max((file for file in (tmp_path / "states" / "1").rglob("*") if file.is_file()), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with Snapshots(tmp_path, keep=2) as snapshots, pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        snapshots.restore(1, state_at(0))


@pytest.mark.parametrize(
    ("like", "sentence"),
    [
        ({"a": jnp.zeros((256, 512), jnp.bfloat16), "b": state_at(0)["b"]}, r"float32 \[256, 512\] for .* bfloat16"),
        ({"a": jnp.zeros((256, 511)), "b": state_at(0)["b"]}, r"\[256, 512\] for array .* \[256, 511\]"),
        ({"a": state_at(0)["a"]}, "has int32 .* this run has nothing"),
    ],
)
def test_a_run_of_other_arrays_is_refused(tmp_path: Path, like: dict[str, jnp.ndarray], sentence: str) -> None:
    save(tmp_path, 1)
    with Snapshots(tmp_path, keep=2) as snapshots, pytest.raises(CheckpointError, match=sentence):
        snapshots.restore(1, like)


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=pytest.mark.long)])
def test_killed_at_random_moments_the_last_complete_one_restores(tmp_path: Path, num_kills: int) -> None:
    dice = random.Random(num_kills)
    last = 0
    for _ in range(num_kills):
        command = [sys.executable, "-m", "tests.train.save_forever", str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            word, step = child.stdout.readline().split()  # it restored the newest, and found it whole
            assert word == "ready"
            assert int(step) >= last
            last = int(step)
            time.sleep(dice.uniform(0.05, 1.0))
            child.kill()
    assert last > 0
