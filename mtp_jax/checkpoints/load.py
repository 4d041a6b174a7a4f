"""From a model's name or folder to a family and its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from mtp_jax.checkpoints.assemble import DTYPES, assemble, checkpoint_dtype, source_dtypes, split, too_large
from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import find_model, read_config
from mtp_jax.checkpoints.fp8 import plain_config
from mtp_jax.checkpoints.gguf_io import GgufReader, is_gguf
from mtp_jax.checkpoints.manifest import Manifest
from mtp_jax.checkpoints.orbax_io import ARRAYS_FOLDER, flatten, restore_weights, unflatten
from mtp_jax.checkpoints.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from mtp_jax.checkpoints.token_ranking import read_ranking
from mtp_jax.core.config import MeshConfig
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config
from mtp_jax.models.sharding import check_mesh
from mtp_jax.ops.placement import Placement


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `folder` is where it came from (its tokenizer is there); `dtype` what it was loaded in.

    `tokens_by_rank`: its tokens by how frequent they are, where the folder says (see `token_ranking`). `tokenizer`: one
    that came in the same file as the weights.
    """

    family: ModelFamily
    weights: Weights
    folder: Path
    dtype: str
    tokens_by_rank: tuple[int, ...] | None = None
    tokenizer: Tokenizer | None = None


def load_model(
    model: str | Path, *, dtype: str | None = None, verify: bool = True, mesh: MeshConfig | None = None
) -> LoadedModel:
    """Family and weights of a bundled name, a Hugging Face layout folder, an Orbax folder of ours, or a `.gguf` file.

    `dtype` None is the checkpoint's own: what its config says, else its tensors'. Tensors whose dtype the family pins
    (`TensorSpec.dtype`) keep that one. `verify=False` skips the checksums of an Orbax folder. With a `mesh` each array
    goes to its devices as an engine on that mesh wants it, and is never whole on one of them. `CheckpointError` (a
    `ConfigError`), one sentence, for whatever is wrong.

    >>> load_model("tiny-mtp", dtype="float32").family.num_mtp_layers       # doctest: +SKIP
    1
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}; allowed: None, {', '.join(map(repr, DTYPES))}.")
    if is_gguf(model):
        return load_gguf(Path(model).expanduser(), dtype=dtype, mesh=mesh)
    folder = find_model(model)
    if not (folder / ARRAYS_FOLDER).is_dir():
        return load_hf(folder, dtype=dtype, mesh=mesh)
    for name in (SINGLE_FILE, INDEX_FILE):
        if (folder / name).exists():
            raise CheckpointError(f"{folder} has both {ARRAYS_FOLDER}/ and {name}; keep one of them.")
    return load_orbax(folder, dtype=dtype, verify=verify, mesh=mesh)


def load_hf(folder: Path, *, dtype: str | None = None, mesh: MeshConfig | None = None) -> LoadedModel:
    """`load_model` of a folder with `config.json` and safetensors."""
    config, weight_block = plain_config(read_config(folder))
    with SafetensorsReader(folder, weight_block) as reader:
        family = family_from_config(config, reader.tensors.keys())
        dtype = dtype or checkpoint_dtype(config, source_dtypes(family.tensors(), reader))
        ranking = read_ranking(folder, family.vocab_size)
        weights = assemble(family, reader, dtype, placement_on(mesh, family))
        return LoadedModel(family, weights, folder, dtype, ranking)


def load_gguf(file: Path, *, dtype: str | None = None, mesh: MeshConfig | None = None) -> LoadedModel:
    """`load_model` of a GGUF file. A ranking of tokens may lie beside the file.

    `dtype` None is that of the embedding, bfloat16 for quantised ones.
    """
    with GgufReader(file) as reader:
        family = family_from_config(reader.config, reader.tensors.keys())
        dtype = dtype or reader.dtype
        ranking = read_ranking(file.parent, family.vocab_size)
        weights = assemble(family, reader, dtype, placement_on(mesh, family))
        return LoadedModel(family, weights, file.parent, dtype, ranking, reader.tokenizer)


def load_orbax(
    folder: Path, *, dtype: str | None = None, verify: bool = True, mesh: MeshConfig | None = None
) -> LoadedModel:
    """`load_model` of a folder that `save_orbax_model` wrote."""
    config = read_config(folder)
    family = family_from_config(config)
    stored = Manifest.read(folder).arrays
    specs = {"/".join(spec.path): spec for spec in family.tensors()}
    for name in sorted(specs.keys() ^ stored.keys()):
        word = "lacks" if name in specs else "does not use"
        who = folder if name in specs else f"family {family.name!r} of {folder}"
        raise CheckpointError(f"{who} {word} array {name!r}.")
    for name, spec in specs.items():
        if stored[name].shape != spec.shape:
            raise CheckpointError(
                f"{folder} has array {name!r} of shape {stored[name].shape}; the config asks for {spec.shape}."
            )
    open_dtypes = {name: stored[name].dtype for name, spec in specs.items() if spec.dtype is None}
    dtype = dtype or checkpoint_dtype(config, open_dtypes)
    placement, target = placement_on(mesh, family), None
    if placement is not None:
        shardings = {name: placement.sharding(split(spec, placement)) for name, spec in specs.items()}
        target = unflatten(
            {name: jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=shardings[name]) for name, of in stored.items()}
        )
    arrays = flatten(restore_weights(folder, target=target, verify=verify))
    for name, spec in specs.items():
        arrays[name] = _cast_in_place(arrays[name], spec.dtype or dtype, f"array {name!r} of {folder}")
    return LoadedModel(family, unflatten(arrays), folder, dtype, read_ranking(folder, family.vocab_size))


def placement_on(mesh: MeshConfig | None, family: ModelFamily) -> Placement | None:
    """The devices of a mesh that the family can be split over; None for no mesh, or one of one device."""
    if mesh is None or mesh.num_devices == 1:
        return None
    check_mesh(family, mesh)
    return Placement.of(mesh)


def _cast_in_place(array: Any, dtype: str, what: str) -> Any:
    """`assemble.cast`, on the devices that hold the array."""
    wanted = jnp.dtype(dtype)
    if array.dtype == wanted:
        return array
    result = array.astype(wanted)
    if wanted.itemsize <= array.dtype.itemsize and bool((jnp.isinf(result) & ~jnp.isinf(array)).any()):
        raise too_large(what, dtype)
    return result
