"""Block-quantised float8 weights: loaded as the numbers they stand for, and refused where they do not add up."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from mtp_jax.checkpoints import CheckpointError, load_model
from mtp_jax.checkpoints.convert import save_hf_model, save_orbax_model
from mtp_jax.models.params import get
from tests.checkpoints.support import golden_config, golden_tensors

GOLDEN = "deepseek_v3_tiny"
BLOCK = (16, 24)  # no golden weight is a multiple of it
QUANTISED = ("o_proj.weight", "gate_proj.weight", "down_proj.weight", "kv_b_proj.weight")
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
NAME = "model.layers.0.self_attn.o_proj.weight"
STORED = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "int32": "I32"}


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, by its definition: the library's numpy side cannot write float8."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": STORED[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += np.ascontiguousarray(array).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def quantised(weight_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(float8 weight, scales, what they stand for), block by block."""
    rows, columns = BLOCK
    scales = np.ones((-(-weight_RC.shape[0] // rows), -(-weight_RC.shape[1] // columns)), np.float32)
    narrow = np.zeros(weight_RC.shape, ml_dtypes.float8_e4m3fn)
    plain = np.zeros(weight_RC.shape, np.float32)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            at = np.s_[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            scales[r, c] = np.abs(weight_RC[at]).max() / 448
            narrow[at] = (weight_RC[at] / scales[r, c]).astype(ml_dtypes.float8_e4m3fn)
            plain[at] = narrow[at].astype(np.float32) * scales[r, c]
    return narrow, scales, plain


def write_quantised(folder: Path, spoil: Callable[[dict[str, np.ndarray], dict[str, Any]], None]) -> dict[str, Any]:
    """The golden model with some weights in float8; the plain tensors it stands for."""
    tensors, plain = golden_tensors(GOLDEN), golden_tensors(GOLDEN)
    for name in list(tensors):
        if name.endswith(QUANTISED):
            tensors[name], tensors[name + "_scale_inv"], plain[name] = quantised(tensors[name])
    config = golden_config(GOLDEN) | {"quantization_config": dict(CONFIG)}
    spoil(tensors, config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors)
    return plain


def test_what_is_loaded_is_value_times_scale_of_its_block(tmp_path: Path) -> None:
    plain = write_quantised(tmp_path / "fp8", lambda tensors, config: None)
    loaded = load_model(tmp_path / "fp8", dtype="float32")
    num_quantised = 0
    for spec in loaded.family.tensors():
        expected = spec.pack([plain[name].astype(np.float32) for name in spec.sources])
        np.testing.assert_array_equal(np.asarray(get(loaded.weights, spec.path)), expected)
        num_quantised += any(name.endswith(QUANTISED) for name in spec.sources)
    assert num_quantised > 3


def test_without_a_dtype_in_the_config_float8_becomes_bfloat16(tmp_path: Path) -> None:
    def only_float8(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        config["torch_dtype"] = "bfloat16"
        config.pop("dtype", None)

    write_quantised(tmp_path / "fp8", only_float8)
    assert load_model(tmp_path / "fp8").dtype == "bfloat16"


@pytest.mark.parametrize("save", [save_hf_model, save_orbax_model])
def test_a_converted_model_is_quantised_no_more(tmp_path: Path, save: Callable[..., None]) -> None:
    write_quantised(tmp_path / "fp8", lambda tensors, config: None)
    save(tmp_path / "fp8", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    one, other = load_model(tmp_path / "fp8"), load_model(tmp_path / "plain")
    jax.tree.map(np.testing.assert_array_equal, one.weights, other.weights)


def no_scale(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    del tensors[NAME + "_scale_inv"]


def short_scale(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    tensors[NAME + "_scale_inv"] = tensors[NAME + "_scale_inv"][:-1]


def spare_scale(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)


def nan_scale(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    tensors[NAME + "_scale_inv"] = np.full_like(tensors[NAME + "_scale_inv"], np.nan)


def nan_weight(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    tensors[NAME] = np.full_like(tensors[NAME], np.nan)


def unsaid(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    del config["quantization_config"]


def other_method(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    config["quantization_config"] |= {"quant_method": "awq"}


def other_format(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    config["quantization_config"] |= {"fmt": "e5m2"}


def no_block(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    config["quantization_config"] |= {"weight_block_size": [128]}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (no_scale, f"'{NAME}' in F8_E4M3; it must be a matrix with scales in '{NAME}_scale_inv'"),
        (short_scale, "has scales of shape"),
        (spare_scale, "q_proj.weight_scale_inv', which family 'deepseek_v3' does not use"),
        (nan_scale, f"has NaN in tensor '{NAME}_scale_inv'"),
        (nan_weight, f"has NaN in tensor '{NAME}'"),
        (unsaid, "in F8_E4M3, and the config has no quantization_config"),
        (other_method, "what can be read is quant_method 'fp8' in fmt 'e4m3'"),
        (other_format, "what can be read is quant_method 'fp8' in fmt 'e4m3'"),
        (no_block, r"weight_block_size \[128\]; it must be two sizes such as"),
    ],
)
def test_what_does_not_add_up_is_named(tmp_path: Path, spoil: Callable[..., None], sentence: str) -> None:
    write_quantised(tmp_path / "fp8", spoil)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path / "fp8")
