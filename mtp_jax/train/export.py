"""From trained weights to a model folder in the Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.checkpoints.folders import write_json
from mtp_jax.checkpoints.safetensors_io import write_tensors
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.params import get


def checkpoint_tensors(family: ModelFamily, weights: Weights, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """The weights under their checkpoint names, rounded to `dtype` (tensors that the family pins keep their own)."""
    tensors: dict[str, np.ndarray] = {}
    for spec in family.tensors():
        wanted = jnp.dtype(spec.dtype or dtype)
        array = np.asarray(jax.device_get(get(weights, spec.path)), np.float32)
        for name, part in zip(spec.sources, spec.unpack(array), strict=True):
            tensors[name] = np.ascontiguousarray(part).astype(wanted)
    return tensors


def rounded(family: ModelFamily, weights: Weights, dtype: str = "bfloat16") -> Weights:
    """Float32 weights with the values that a checkpoint of `dtype` holds: what its users compute with."""
    pinned = {spec.path: spec.dtype for spec in family.tensors()}

    def visit(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, Mapping):
            return {name: visit(child, (*path, name)) for name, child in node.items()}
        return node if pinned[path] else node.astype(dtype).astype(jnp.float32)

    return visit(weights, ())


def write_model(folder: Path, family: ModelFamily, weights: Weights, config: Mapping[str, Any]) -> int:
    """Writes `config.json` and the weights into `folder`; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    tensors = checkpoint_tensors(family, weights, config["dtype"])
    write_tensors(folder, tensors.items())
    return sum(tensor.nbytes for tensor in tensors.values())
