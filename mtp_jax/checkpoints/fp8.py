"""DeepSeek's block-quantised weights: float8 (e4m3) with one scale for each block, made plain numbers on load.

A quantised `NAME.weight` [R, C] has a float32 `NAME.weight_scale_inv` [ceil(R / r), ceil(C / c)] beside it, and
`quantization_config.weight_block_size` [r, c] (128, 128) in the config; weight = float8 value * scale of its block.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from mtp_jax.checkpoints.errors import CheckpointError

STORED_DTYPE = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"
_CONFIG_FIELD = "quantization_config"
Block = tuple[int, int]


def plain_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], Block | None]:
    """The config of the weights as they are once loaded, and the block size they are stored with (None: unquantised).

    `CheckpointError` for any other way of quantising.
    """
    fields = {name: value for name, value in config.items() if name != _CONFIG_FIELD}
    stated = config.get(_CONFIG_FIELD)
    if not stated:
        return fields, None
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "fp8" or stated.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f"config field {_CONFIG_FIELD!r} is {stated!r}; what can be read is quant_method 'fp8' in fmt 'e4m3'."
        )
    block = stated.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            f"config field {_CONFIG_FIELD!r} has weight_block_size {block!r}; it must be two sizes such as [128, 128]."
        )
    return fields, (block[0], block[1])


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Shape of the scales of a weight.

    >>> scale_shape((576, 7168), (128, 128))
    (5, 56)
    """
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantised(
    weight_RC: Float[np.ndarray, "R C"], scale_rc: Float[np.ndarray, "r c"], block: Block
) -> Float[np.ndarray, "R C"]:
    """The weight as float32.

    >>> ones = np.ones((3, 2), ml_dtypes.float8_e4m3fn)
    >>> dequantised(ones, np.array([[2.0], [3.0]], np.float32), (2, 128)).tolist()
    [[2.0, 2.0], [2.0, 2.0], [3.0, 3.0]]
    """
    num_rows, num_columns = weight_RC.shape
    scale_RC = np.repeat(np.repeat(scale_rc, block[0], axis=0)[:num_rows], block[1], axis=1)[:, :num_columns]
    return weight_RC.astype(np.float32) * scale_RC


def read_float8(file: Path, name: str) -> np.ndarray:
    """A float8 tensor of a safetensors file, whose numpy reader knows no such type; the header was checked before."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))[name]
        start, end = header["data_offsets"]
        opened.seek(8 + header_bytes + start)
        data = opened.read(end - start)
    return np.frombuffer(data, ml_dtypes.float8_e4m3fn).reshape(header["shape"])
