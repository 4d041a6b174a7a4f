"""Orbax with a manifest: bit-exact, sharded as asked, damage named, and no half checkpoint after a kill."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtp_jax.checkpoints import CheckpointError, folders, manifest, restore_weights, save_weights
from tests.checkpoints.support import assert_same_bits, flip_byte


def some_weights() -> dict[str, Any]:
    noise = jax.random.normal(jax.random.key(0), (16, 24), jnp.float32)
    return {
        "layers": {"0": {"w": noise, "scale": jnp.ones(24, jnp.bfloat16)}, "10": {"w": noise.astype(jnp.float16)}},
        "head": noise.astype(jnp.bfloat16),
    }


def data_files(folder: Path) -> list[Path]:
    """Files that hold array values, largest first."""
    files = [file for file in (folder / "orbax").rglob("d/*") if file.is_file()]
    return sorted(files, key=lambda file: file.stat().st_size, reverse=True)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "intact"
    save_weights(some_weights(), folder)
    return folder


@pytest.fixture
def saved(intact: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", intact, folder], check=True)
    return folder


def test_restored_is_what_was_saved_bit_for_bit(intact: Path) -> None:
    assert_same_bits(restore_weights(intact), some_weights())


def test_restored_inside_a_running_event_loop(intact: Path) -> None:
    """Notebooks have one."""

    async def cell() -> Any:
        return restore_weights(intact)

    assert_same_bits(asyncio.run(cell()), some_weights())


def test_arrays_come_sharded_as_the_target_asks(intact: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    weights = some_weights()
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    target["head"] = jax.ShapeDtypeStruct((16, 24), jnp.bfloat16, sharding=sharding)
    restored = restore_weights(intact, target=target)
    assert restored["head"].sharding == sharding
    assert len(restored["layers"]["0"]["w"].sharding.device_set) == 1
    assert_same_bits(restored, weights)


def test_sharded_arrays_are_saved_whole(tmp_path: Path) -> None:
    weights = some_weights()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), PartitionSpec("model"))
    save_weights({**weights, "head": jax.device_put(weights["head"], sharding)}, tmp_path / "saved")
    assert_same_bits(restore_weights(tmp_path / "saved"), weights)


def _changed(target: dict[str, Any], shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    return {**target, "head": jax.ShapeDtypeStruct(shape, dtype)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: _changed(t, (24, 16), jnp.bfloat16), r"array 'head' of shape \(16, 24\); asked for: \(24, 16\)"),
        (lambda t: _changed(t, (16, 24), jnp.float32), "array 'head' in bfloat16; asked for: float32"),
        (lambda t: {**t, "tail": t["head"]}, "has no array 'tail', which the target asks for"),
        (lambda t: {"layers": t["layers"]}, "has array 'head', which the target lacks"),
    ],
)
def test_a_target_that_differs_is_refused(
    intact: Path, change: Callable[[dict[str, Any]], dict[str, Any]], sentence: str
) -> None:
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), some_weights())
    with pytest.raises(CheckpointError, match=sentence):
        restore_weights(intact, target=change(target), verify=False)


def test_a_flipped_byte_is_an_error_that_names_the_file(saved: Path) -> None:
    file = data_files(saved)[0]
    flip_byte(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: its SHA-256"):
        restore_weights(saved)


def test_a_flipped_byte_anywhere_is_seen(saved: Path) -> None:
    for file in sorted(file for file in (saved / "orbax").rglob("*") if file.is_file()):
        flip_byte(file, 0)
        with pytest.raises(CheckpointError, match=rf"{file.name} is damaged"):
            restore_weights(saved)
        flip_byte(file, 0)
    restore_weights(saved)


def test_checksums_can_be_skipped(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = json.loads((saved / "manifest.json").read_text(encoding="utf-8"))
    name = data_files(saved)[0].relative_to(saved).as_posix()
    fields["files"][name]["sha256"] = "0" * 64
    (saved / "manifest.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is damaged"):
        restore_weights(saved)
    monkeypatch.setattr(manifest.FileFacts, "of", lambda file: pytest.fail("read for its checksum"))
    assert_same_bits(restore_weights(saved, verify=False), some_weights())


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_a_short_or_missing_file_is_named(saved: Path, fault: str) -> None:
    file = data_files(saved)[0]
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name} (is missing|has \d+ bytes; \d+ were saved)"):
        restore_weights(saved)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "manifest.json is missing: .* its save did not finish"),
        ("{", "manifest.json is not JSON"),
        ("{}", "manifest.json has format None; this version reads format 1"),
        ('{"format": 2}', "manifest.json has format 2"),
        ('{"format": 1}', "manifest.json is damaged: KeyError 'arrays'"),
        (
            '{"format": 1, "arrays": {"head": {"shape": [1]}}, "files": {}}',
            "manifest.json is damaged: KeyError 'dtype'",
        ),
        ('{"format": 1, "arrays": {}, "files": {"orbax/_METADATA": {}}}', "manifest.json is damaged: KeyError 'bytes'"),
    ],
)
def test_a_bad_manifest_is_named(saved: Path, text: str | None, sentence: str) -> None:
    file = saved / "manifest.json"
    file.unlink() if text is None else file.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=sentence):
        restore_weights(saved)


@pytest.mark.parametrize(("odd", "word"), [(jnp.nan, "NaN"), (-jnp.inf, "an infinity")])
def test_what_is_no_number_is_not_saved(tmp_path: Path, odd: float, word: str) -> None:
    weights = some_weights()
    weights["layers"]["10"]["w"] = weights["layers"]["10"]["w"].at[3, 3].set(odd)
    with pytest.raises(CheckpointError, match=f"array 'layers/10/w' holds {word}"):
        save_weights(weights, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save_weights({"a": jnp.zeros(3)}, folder)
    with pytest.raises(CheckpointError, match="exists already; remove it or pass overwrite=True"):
        save_weights({"a": jnp.ones(3)}, folder)
    save_weights({"a": jnp.ones(3)}, folder, overwrite=True)
    assert_same_bits(restore_weights(folder), {"a": np.ones(3, np.float32)})
    assert list(tmp_path.iterdir()) == [folder]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    save_weights({"a": jnp.zeros(3)}, folder)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(manifest, "write_json", fail)
    with pytest.raises(OSError, match="no space left"):
        save_weights({"a": jnp.ones(3)}, folder, overwrite=True)
    assert_same_bits(restore_weights(folder), {"a": np.zeros(3, np.float32)})
    assert list(tmp_path.iterdir()) == [folder]


def test_a_replacement_that_fails_at_the_last_moment_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    save_weights({"a": jnp.zeros(3)}, folder)
    rename = Path.rename

    def fail_for_the_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(KeyboardInterrupt):
        save_weights({"a": jnp.ones(3)}, folder, overwrite=True)
    assert_same_bits(restore_weights(folder), {"a": np.zeros(3, np.float32)})
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.multiprocess
def test_a_killed_save_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """Killed when the arrays are there and the manifest is not: the last moment before the checkpoint is whole."""
    script = (
        "import os, signal, sys, jax.numpy as jnp\n"
        "from pathlib import Path\n"
        "from mtp_jax.checkpoints import manifest, save_weights\n"
        "manifest.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "save_weights({'a': jnp.ones(3)}, Path(sys.argv[1]))\n"
    )
    folder = tmp_path / "saved"
    root = Path(folders.__file__).parents[2]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    killed = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    (partial,) = tmp_path.glob(".saved.partial-*/new")
    assert (partial / "orbax").is_dir()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing: .* its save did not finish"):
        restore_weights(partial)
    save_weights({"a": jnp.ones(3)}, folder)
    assert_same_bits(restore_weights(folder), {"a": np.ones(3, np.float32)})
