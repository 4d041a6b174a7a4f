"""Hugging Face layout to Orbax and back: bit for bit, and whole folders."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mtp_jax.checkpoints import CheckpointError, load_model, restore_weights, save_hf_model, save_orbax_model, write_hf
from mtp_jax.models.params import get
from tests.checkpoints.support import (
    GOLDEN_NAMES,
    GOLDENS,
    SMALL,
    assert_same_bits,
    golden_config,
    golden_tensors,
    write_model,
)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_to_orbax_and_back_is_bit_exact(tmp_path: Path, name: str) -> None:
    save_orbax_model(GOLDENS / name, tmp_path / "orbax")
    original, converted = load_model(GOLDENS / name), load_model(tmp_path / "orbax")
    assert converted.family == original.family
    assert converted.dtype == original.dtype
    assert_same_bits(converted.weights, original.weights)
    save_hf_model(tmp_path / "orbax", tmp_path / "hf")
    assert_same_bits(load_file(tmp_path / "hf" / "model.safetensors"), golden_tensors(name))
    assert json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8")) == golden_config(name)


def bfloat16_model(folder: Path) -> dict[str, np.ndarray]:
    tensors = {
        name: array if name.endswith("e_score_correction_bias") else array.astype(jnp.bfloat16)
        for name, array in golden_tensors().items()
    }
    write_model(folder, tensors, golden_config() | {"dtype": "bfloat16"})
    return tensors


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    tensors = bfloat16_model(tmp_path / "source")
    save_orbax_model(tmp_path / "source", tmp_path / "orbax")
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "orbax").rglob("*") if file.is_file())
    assert num_bytes < 1.1 * sum(array.nbytes for array in tensors.values())
    assert load_model(tmp_path / "orbax").dtype == "bfloat16"
    # What is stored, not what loading makes of it: float32 copies would compress to the same size and be cast back.
    family = load_model(tmp_path / "source").family
    stored = restore_weights(tmp_path / "orbax")
    assert {get(stored, spec.path).dtype.name for spec in family.tensors() if spec.dtype is None} == {"bfloat16"}
    save_hf_model(tmp_path / "orbax", tmp_path / "hf")
    assert_same_bits(load_file(tmp_path / "hf" / "model.safetensors"), tensors)


def test_orbax_loads_in_the_dtype_asked_for(tmp_path: Path) -> None:
    bfloat16_model(tmp_path / "source")
    save_orbax_model(tmp_path / "source", tmp_path / "orbax")
    for dtype in (None, "float32", "bfloat16", "float16"):
        loaded = load_model(tmp_path / "orbax", dtype=dtype)
        expected = load_model(tmp_path / "source", dtype=dtype)
        assert loaded.dtype == expected.dtype
        assert_same_bits(loaded.weights, expected.weights)


def test_the_tokenizer_and_its_kin_move_along(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (source / "tokenizer_config.json").write_text('{"a": 1}', encoding="utf-8")
    (source / "optimizer.bin").write_bytes(b"0")
    save_orbax_model(source, tmp_path / "orbax")
    assert {file.name for file in (tmp_path / "orbax").iterdir()} == {
        "config.json", "manifest.json", "orbax", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (tmp_path / "orbax" / "tokenizer_config.json").read_text(encoding="utf-8") == '{"a": 1}'


def test_no_file_of_a_converted_model_knows_where_it_was_made(tmp_path: Path) -> None:
    save_orbax_model(GOLDENS / SMALL, tmp_path / "orbax")
    for file in (tmp_path / "orbax").rglob("*"):
        assert not file.is_file() or str(tmp_path).encode() not in file.read_bytes()


def test_a_count_that_only_the_tensors_knew_is_written_down(tmp_path: Path) -> None:
    config = golden_config("deepseek_v3_mtp2_tiny")
    del config["num_nextn_predict_layers"]
    write_model(tmp_path / "source", golden_tensors("deepseek_v3_mtp2_tiny"), config)
    save_orbax_model(tmp_path / "source", tmp_path / "orbax")
    assert load_model(tmp_path / "orbax").family.num_mtp_layers == 2


def test_a_bad_source_leaves_no_folder(tmp_path: Path) -> None:
    tensors = golden_tensors()
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lacks tensor 'lm_head\.weight'"):
        save_orbax_model(write_model(tmp_path / "source", tensors), tmp_path / "orbax")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_config_and_manifest_must_speak_of_the_same_arrays(tmp_path: Path) -> None:
    save_orbax_model(GOLDENS / SMALL, tmp_path / "orbax")
    file = tmp_path / "orbax" / "config.json"
    for change, sentence in (
        ({"num_nextn_predict_layers": 0}, r"family 'glm4_moe' of .* does not use array 'mtp_layers/0"),
        ({"num_hidden_layers": 4}, r"lacks array 'layers/3/"),
        ({"vocab_size": 400}, r"array 'embedding' of shape \(384, 64\); the config asks for \(400, 64\)"),
    ):
        file.write_text(json.dumps(golden_config() | change), encoding="utf-8")
        with pytest.raises(CheckpointError, match=sentence):
            load_model(tmp_path / "orbax")


def test_a_folder_with_both_formats_is_refused(tmp_path: Path) -> None:
    save_orbax_model(write_model(tmp_path / "source"), tmp_path / "orbax")
    (tmp_path / "source" / "model.safetensors").rename(tmp_path / "orbax" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both orbax/ and model\.safetensors"):
        load_model(tmp_path / "orbax")


def test_written_from_memory_in_shards(tmp_path: Path) -> None:
    loaded = load_model(GOLDENS / "deepseek_v3_tiny")
    config = golden_config("deepseek_v3_tiny")
    write_hf(loaded.family, loaded.weights, config, tmp_path / "hf", max_shard_bytes=400_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    assert_same_bits(load_model(tmp_path / "hf").weights, loaded.weights)


def test_the_written_config_states_the_dtype_of_the_weights(tmp_path: Path) -> None:
    loaded = load_model(GOLDENS / SMALL, dtype="bfloat16")
    write_hf(loaded.family, loaded.weights, golden_config() | {"torch_dtype": "float32"}, tmp_path / "hf")
    again = load_model(tmp_path / "hf", dtype=None)
    assert again.dtype == "bfloat16"
    assert_same_bits(again.weights, loaded.weights)
