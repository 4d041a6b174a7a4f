"""From trained weights to a model folder in the Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mtp_jax.checkpoints.convert import fill_hf
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.train.state import in_dtype


def rounded(family: ModelFamily, weights: Weights, dtype: str = "bfloat16") -> Weights:
    """Float32 weights with the values that a checkpoint of `dtype` holds: what its users compute with."""
    return in_dtype(family, in_dtype(family, weights, dtype), jnp.float32)


def write_model(folder: Path, family: ModelFamily, weights: Weights, config: Mapping[str, Any]) -> int:
    """Writes `config.json` and the weights, in the config's dtype, into `folder`; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    fill_hf(family, in_dtype(family, weights, config["dtype"]), config, folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
