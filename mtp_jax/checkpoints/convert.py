"""Model folders from one format to the other, and a Hugging Face layout folder from weights in memory."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax.checkpoints.folders import CONFIG_FILE, new_folder, read_config, write_json
from mtp_jax.checkpoints.fp8 import plain_config
from mtp_jax.checkpoints.gguf_io import GgufReader, is_gguf
from mtp_jax.checkpoints.head import add_head
from mtp_jax.checkpoints.load import load_hf, load_model
from mtp_jax.checkpoints.orbax_io import fill_folder
from mtp_jax.checkpoints.safetensors_io import write_tensors
from mtp_jax.checkpoints.token_ranking import RANKING_FILE, write_ranking
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.hf_config import NUM_MTP_LAYERS_NAMES
from mtp_jax.models.params import get

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    RANKING_FILE,
)
"""What makes text of tokens; other weights of the same vocabulary share it."""
COMPANION_FILES = (*TEXT_FILES, "training.json", "README.md", "LICENSE")
"""What moves along with weights and config, where it is there."""


def save_orbax_model(source: str | Path, folder: str | Path, *, overwrite: bool = False) -> None:
    """Converts a Hugging Face layout folder into an Orbax model folder, arrays in the checkpoint's own dtype.

    `folder` gets `config.json`, the tokenizer's files, `orbax/` and `manifest.json`, all at once. Nothing is written
    if anything is wrong with the source: see `load_model`.

    >>> save_orbax_model("trained/", "checkpoints/tiny-mtp")        # doctest: +SKIP
    """
    source = Path(source)
    loaded = load_hf(source)
    with new_folder(Path(folder), overwrite=overwrite) as partial:
        config = _with_num_mtp_layers(plain_config(read_config(source))[0], loaded.family)
        write_json(partial / CONFIG_FILE, config)
        copy_files(COMPANION_FILES, source, partial)
        fill_folder(loaded.weights, partial)


def save_hf_model(
    source: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    head: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Converts any model that `load_model` takes into a Hugging Face layout folder, with the MTP layers of `head`."""
    loaded = load_model(source, dtype=dtype)
    with new_folder(Path(folder), overwrite=overwrite) as partial:
        if is_gguf(source):
            config = gguf_companions(Path(source), partial)
        else:
            config = plain_config(read_config(loaded.folder))[0]
            copy_files(COMPANION_FILES, loaded.folder, partial)
        if head is not None:
            loaded, config = add_head(loaded, config, Path(head))
        if loaded.tokens_by_rank is not None:
            write_ranking(partial, loaded.tokens_by_rank)
        fill_hf(loaded.family, loaded.weights, config, partial)


def gguf_companions(file: Path, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer of a GGUF file into the folder, and its chat template; returns its `config.json`."""
    with GgufReader(file.expanduser()) as reader:
        if reader.tokenizer is not None:
            reader.tokenizer.save(str(folder / "tokenizer.json"))
        if reader.chat_template is not None:
            (folder / "chat_template.jinja").write_text(reader.chat_template, encoding="utf-8")
        return reader.config


def write_hf(
    family: ModelFamily,
    weights: Weights,
    config: Mapping[str, Any],
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes `config.json` and safetensors from weights in memory; the exact inverse of loading, bit for bit.

    Embedding and head are repeated in each MTP layer, as released checkpoints do and other readers expect. The
    config's dtype becomes that of the weights.
    """
    with new_folder(Path(folder), overwrite=overwrite) as partial:
        fill_hf(family, weights, config, partial, max_shard_bytes)


def fill_hf(
    family: ModelFamily,
    weights: Weights,
    config: Mapping[str, Any],
    folder: Path,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes into an existing folder: the part of `write_hf` between start and rename."""
    dtypes = {get(weights, spec.path).dtype.name for spec in family.tensors() if spec.dtype is None}
    fields = _with_num_mtp_layers(config, family)
    if len(dtypes) == 1:
        fields = {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
        fields["dtype"] = dtypes.pop()
    write_json(folder / CONFIG_FILE, fields)
    write_tensors(folder, _named_tensors(family, weights), max_shard_bytes=max_shard_bytes)


def _named_tensors(family: ModelFamily, weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    copies: dict[str, list[str]] = {}
    for copy, original in family.duplicates().items():
        copies.setdefault(original, []).append(copy)
    for spec in family.tensors():
        parts = spec.unpack(np.asarray(get(weights, spec.path)))
        for name, part in zip(spec.sources, parts, strict=True):
            for each in (name, *copies.get(name, ())):
                yield each, part


def _with_num_mtp_layers(config: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The config, made to state what otherwise only the tensors' names tell."""
    if any(config.get(name) is not None for name in NUM_MTP_LAYERS_NAMES):
        return dict(config)
    return {**config, NUM_MTP_LAYERS_NAMES[0]: family.num_mtp_layers}


def copy_files(names: Sequence[str], source: Path, folder: Path) -> None:
    """Copies those of the named files that `source` has."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
