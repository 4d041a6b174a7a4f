"""What the checkpoint tests share: golden folders to spoil, and trees to compare bit for bit."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN_NAMES = ("deepseek_v3_tiny", "deepseek_v3_mtp2_tiny", "glm4_moe_tiny")
SMALL = "glm4_moe_tiny"


def golden_tensors(name: str = SMALL) -> dict[str, np.ndarray]:
    return load_file(GOLDENS / name / "model.safetensors")


def golden_config(name: str = SMALL) -> dict[str, Any]:
    return json.loads((GOLDENS / name / "config.json").read_text(encoding="utf-8"))


def write_model(
    folder: Path, tensors: Mapping[str, np.ndarray] | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """A model folder of one file; the small golden's tensors and config where none are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden_config() if config is None else config), encoding="utf-8")
    save_file(dict(golden_tensors() if tensors is None else tensors), folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, tensors: Mapping[str, np.ndarray], num_shards: int) -> dict[str, str]:
    """The small golden's config with `tensors` dealt out over shards; returns the index's map."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(GOLDENS / SMALL / "config.json", folder / "config.json")
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: array for at, (name, array) in enumerate(tensors.items()) if at % num_shards == shard}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    fields = {"metadata": {}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(fields), encoding="utf-8")


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal structure, shapes, dtypes and bytes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()


def flip_byte(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
