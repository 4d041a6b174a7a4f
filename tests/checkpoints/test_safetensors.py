"""Hugging Face layout: every tensor accounted for, and one sentence that names file and tensor for each fault."""

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.checkpoints import CheckpointError, load_model
from mtp_jax.checkpoints.safetensors_io import SafetensorsReader, write_tensors
from tests.checkpoints.support import (
    GOLDEN_NAMES,
    GOLDENS,
    assert_same_bits,
    golden_config,
    golden_tensors,
    write_index,
    write_model,
    write_sharded,
)
from tests.models.support import Golden

NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
COPY = "model.layers.3.embed_tokens.weight"
Spoil = Callable[[dict[str, np.ndarray]], None]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_weights_are_the_checkpoints(name: str) -> None:
    loaded, golden = load_model(GOLDENS / name, dtype=None), Golden.load(name)
    assert loaded.family == golden.family
    assert loaded.dtype == "float32"
    assert loaded.folder == GOLDENS / name
    assert_same_bits(loaded.weights, golden.weights)


def test_dtype_is_what_was_asked_for_except_where_the_family_pins_it() -> None:
    loaded = load_model(GOLDENS / "glm4_moe_tiny", dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    pinned = {spec.path[-1] for spec in loaded.family.tensors() if spec.dtype == "float32"}
    assert pinned == {"correction_bias"}
    for path, leaf in jax.tree.leaves_with_path(loaded.weights):
        assert leaf.dtype == ("float32" if path[-1].key in pinned else "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_in_config", [True, False])
def test_dtype_none_is_the_checkpoints_own(tmp_path: Path, dtype: str, is_in_config: bool) -> None:
    config = golden_config() | {"dtype": dtype if is_in_config else None}
    narrow = {name: array.astype(jax.numpy.dtype(dtype)) for name, array in golden_tensors().items()}
    loaded = load_model(write_model(tmp_path, narrow, config), dtype=None)
    assert loaded.dtype == dtype
    assert loaded.weights["embedding"].dtype == dtype
    assert np.asarray(loaded.weights["embedding"]).tobytes() == narrow["model.embed_tokens.weight"].tobytes()


def test_shards_are_read_as_one_file_is(tmp_path: Path) -> None:
    write_sharded(tmp_path, golden_tensors(), num_shards=3)
    assert_same_bits(load_model(tmp_path).weights, load_model(GOLDENS / "glm4_moe_tiny").weights)


def test_copies_and_frequency_tables_may_be_there_or_not(tmp_path: Path) -> None:
    tensors = golden_tensors()
    del tensors[COPY]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert_same_bits(load_model(write_model(tmp_path, tensors)).weights, load_model(GOLDENS / "glm4_moe_tiny").weights)


def _set(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _drop(*names: str) -> Spoil:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        for name in names:
            del tensors[name]

    return spoil


def _one_nan(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[-1] = np.nan
    return array


SPOILED: dict[str, tuple[Spoil, str]] = {
    "missing": (_drop(NORM), rf"lacks tensor '{NORM}', which family 'glm4_moe' needs"),
    "two missing": (_drop(NORM, "lm_head.weight"), "lacks tensors '.*', '.*', which"),
    "misshapen": (
        _set(NORM, lambda array: array[:-1]),
        rf"tensor '{NORM}' of shape \[63\]; the config asks for \[64\]",
    ),
    "transposed": (_set(DOWN, lambda array: np.ascontiguousarray(array.T)), rf"'{DOWN}' of shape \[128, 64\]"),
    "unknown": (lambda tensors: tensors.update(extra=np.ones(1, np.float32)), "has tensor 'extra', which family"),
    "nan": (_set(NORM, _one_nan), rf"model.safetensors has NaN in tensor '{NORM}'"),
    "infinity": (_set(NORM, lambda array: array * np.float32(np.inf)), rf"has an infinity in tensor '{NORM}'"),
    "bfloat16 nan": (_set(NORM, lambda array: _one_nan(array.astype(ml_dtypes.bfloat16))), rf"NaN in tensor '{NORM}'"),
    "other copy": (_set(COPY, lambda array: array + np.float32(1e-6)), rf"'{COPY}', which must equal .* but differs"),
    "misshapen copy": (_set(COPY, lambda array: array[:-1]), rf"'{COPY}' of shape"),
    "integer": (_set(NORM, lambda array: array.astype(np.int32)), rf"'{NORM}' in I32; allowed: BF16, F16, F32"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_tensor_is_named(tmp_path: Path, case: str) -> None:
    spoil, sentence = SPOILED[case]
    tensors = golden_tensors()
    spoil(tensors)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load_model(write_model(tmp_path, tensors))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_too_large_for_the_wanted_dtype_is_an_error(tmp_path: Path) -> None:
    tensors = golden_tensors()
    tensors[NORM] = tensors[NORM] * np.float32(1e6)
    folder = write_model(tmp_path, tensors)
    load_model(folder, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=rf"'{NORM}' of .* too large for float16"):
        load_model(folder, dtype="float16")


@pytest.mark.parametrize("num_bytes", [4, 1000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, num_bytes: int) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=re.escape(f"{file} is truncated or no safetensors file")):
        load_model(tmp_path)


class TestIndex:
    @pytest.fixture
    def weight_map(self, tmp_path: Path) -> dict[str, str]:
        return write_sharded(tmp_path, golden_tensors(), num_shards=2)

    def test_missing_file(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        (tmp_path / weight_map[NORM]).unlink()
        with pytest.raises(CheckpointError, match=rf"{weight_map[NORM]} is missing; .* holds tensor '.*'"):
            load_model(tmp_path)

    def test_tensor_in_no_file(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        write_index(tmp_path, weight_map | {"ghost": weight_map[NORM]})
        with pytest.raises(CheckpointError, match=rf"{weight_map[NORM]} has no tensor 'ghost'"):
            load_model(tmp_path)

    def test_tensor_in_two_files(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        (other,) = set(weight_map.values()) - {weight_map[NORM]}
        file = tmp_path / other
        save_file({**load_file(file), NORM: golden_tensors()[NORM]}, file)
        with pytest.raises(CheckpointError, match=rf"tensor '{NORM}' is in .* and again in "):
            load_model(tmp_path)

    def test_tensor_in_another_file_than_stated(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        (other,) = set(weight_map.values()) - {weight_map[NORM]}
        write_index(tmp_path, weight_map | {NORM: other})
        with pytest.raises(CheckpointError, match=rf"{other} has no tensor '{NORM}'"):
            load_model(tmp_path)

    def test_tensor_that_is_not_listed(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        del weight_map[NORM]
        write_index(tmp_path, weight_map)
        with pytest.raises(CheckpointError, match=rf"has tensor '{NORM}', which .* does not list"):
            load_model(tmp_path)

    def test_file_of_another_folder(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        write_index(tmp_path, weight_map | {NORM: "../model.safetensors"})
        with pytest.raises(CheckpointError, match="it must be a file of the same folder"):
            load_model(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
    def test_unreadable(self, tmp_path: Path, weight_map: dict[str, str], text: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"index.json (is not JSON|has no 'weight_map')"):
            load_model(tmp_path)

    def test_beside_a_single_file(self, tmp_path: Path, weight_map: dict[str, str]) -> None:
        save_file(golden_tensors(), tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"has both model\.safetensors and"):
            load_model(tmp_path)


def test_written_shards_stay_below_their_limit_and_read_back(tmp_path: Path) -> None:
    tensors = {f"t{at}": np.full((at + 1, 10), at, np.float32) for at in range(8)}
    write_tensors(tmp_path, iter(tensors.items()), max_shard_bytes=400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    for file_name in set(index["weight_map"].values()):
        assert sum(array.nbytes for array in load_file(tmp_path / file_name).values()) <= 400
    with SafetensorsReader(tmp_path) as reader:
        assert_same_bits({name: reader.read(name) for name in reader.tensors}, tensors)


def test_loading_holds_little_more_than_the_weights(tmp_path: Path) -> None:
    """Traced is what Python and numpy allocate, the device arrays that alias it included."""
    write_sharded(tmp_path, golden_tensors(), num_shards=3)
    load_model(tmp_path)
    tracemalloc.start()
    try:
        loaded = load_model(tmp_path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    arrays = [leaf.nbytes for leaf in jax.tree.leaves(loaded.weights)]
    assert peak - kept < 4 * max(arrays) < sum(arrays) / 2
