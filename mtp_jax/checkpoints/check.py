"""Whether a checkpoint fits its config, before any of its data is here: names from the index, shapes from headers."""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mtp_jax.checkpoints.assemble import check_names, check_names_and_shapes
from mtp_jax.checkpoints.folders import find_model, read_config
from mtp_jax.checkpoints.fp8 import SCALE_SUFFIX, plain_config
from mtp_jax.checkpoints.load import load_model
from mtp_jax.checkpoints.orbax_io import ARRAYS_FOLDER
from mtp_jax.checkpoints.safetensors_io import SafetensorsReader, read_index
from mtp_jax.models.api import MTP_ROOT, ModelFamily
from mtp_jax.models.registry import family_from_config


@dataclass(frozen=True)
class Checked:
    """What was found right, of which model. `depth`: "names", "names and shapes" or "data"."""

    family: ModelFamily
    depth: str

    @property
    def num_parameters(self) -> int:
        """All weights, each copy counted once."""
        return sum(prod(spec.shape) for spec in self.family.tensors())

    @property
    def num_mtp_parameters(self) -> int:
        """Those of the MTP layers."""
        return sum(prod(spec.shape) for spec in self.family.tensors() if spec.path[0] == MTP_ROOT)


def check_model(model: str | Path) -> Checked:
    """Checks as much of a model folder as is there.

    Config and index alone: every tensor named, and used. Files of safetensors too: their headers, which are all that is
    read of them. An Orbax folder is restored whole, its checksums compared. `CheckpointError` for what does not fit.

    >>> check_model("tiny-mtp").family.num_mtp_layers       # doctest: +SKIP
    1
    """
    folder = find_model(model)
    if (folder / ARRAYS_FOLDER).is_dir():
        return Checked(load_model(model).family, "data")
    config, weight_block = plain_config(read_config(folder))
    index = read_index(folder)
    if index is not None and not any((folder / file).is_file() for file in index.values()):
        names = index.keys() if weight_block is None else _without_scales(index.keys())
        family = family_from_config(config, names)
        check_names(family, names, folder)
        return Checked(family, "names")
    with SafetensorsReader(folder, weight_block) as reader:
        family = family_from_config(config, reader.tensors.keys())
        check_names_and_shapes(family, reader)
    return Checked(family, "names and shapes")


def _without_scales(names: Collection[str]) -> set[str]:
    """The weights of a float8 checkpoint: a scale belongs to the weight that it is named after."""
    return {
        name for name in names if name.removesuffix(SCALE_SUFFIX) == name or name[: -len(SCALE_SUFFIX)] not in names
    }
