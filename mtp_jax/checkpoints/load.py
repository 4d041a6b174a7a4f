"""From a model's name or folder to a family and its weights."""

from dataclasses import dataclass
from pathlib import Path

from mtp_jax.checkpoints.assemble import DTYPES, assemble, checkpoint_dtype, source_dtypes
from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import find_model, read_config
from mtp_jax.checkpoints.safetensors_io import SafetensorsReader
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `folder` is where it came from (its tokenizer is there); `dtype` what it was loaded in."""

    family: ModelFamily
    weights: Weights
    folder: Path
    dtype: str


def load_model(model: str | Path, *, dtype: str | None = None) -> LoadedModel:
    """Family and weights of a bundled name, a Hugging Face layout folder, or an Orbax folder of `save_orbax_model`.

    `dtype` None is the checkpoint's own: what its config says, else its tensors'. Tensors whose dtype the family pins
    (`TensorSpec.dtype`) keep that one. `CheckpointError` (a `ConfigError`), one sentence, for whatever is wrong.

    >>> load_model("tiny-mtp", dtype="float32").family.num_mtp_layers       # doctest: +SKIP
    1
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}; allowed: None, {', '.join(map(repr, DTYPES))}.")
    return load_hf(find_model(model), dtype=dtype)


def load_hf(folder: Path, *, dtype: str | None = None) -> LoadedModel:
    """`load_model` of a folder with `config.json` and safetensors."""
    config = read_config(folder)
    with SafetensorsReader(folder) as reader:
        family = family_from_config(config, reader.tensors.keys())
        dtype = dtype or checkpoint_dtype(config, source_dtypes(family.tensors(), reader))
        return LoadedModel(family, assemble(family, reader, dtype), folder, dtype)
