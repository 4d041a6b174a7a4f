"""MTP layers in a folder of their own, to be laid over the model that they were trained for.

    <folder>/head.json            of which model: its name, and a fingerprint of it; how many layers
    <folder>/model.safetensors    the layers, by the names that they have in the whole model

So a head of a few megabytes can be given away beside a model that is fetched elsewhere.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax.checkpoints.assemble import assemble
from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import read_json, write_json
from mtp_jax.checkpoints.load import LoadedModel
from mtp_jax.checkpoints.safetensors_io import SafetensorsReader, write_tensors
from mtp_jax.checkpoints.token_ranking import read_ranking
from mtp_jax.models.api import MTP_ROOT, ModelFamily, TensorSpec, Weights
from mtp_jax.models.hf_config import NUM_MTP_LAYERS_NAMES
from mtp_jax.models.params import get
from mtp_jax.models.registry import family_from_config

HEAD_FILE = "head.json"


def write_head(folder: Path, family: ModelFamily, weights: Weights, trunk: str) -> int:
    """Writes the MTP layers of a model named `trunk` into an existing folder; returns the bytes of the weights."""
    layers = MtpLayers(family)
    tensors = [
        (name, part)
        for spec in layers.tensors()
        for name, part in zip(spec.sources, spec.unpack(np.asarray(get(weights, spec.path))), strict=True)
    ]
    write_tensors(folder, tensors)
    facts = {"trunk": trunk, "trunk_fingerprint": fingerprint(family, weights), "num_mtp_layers": family.num_mtp_layers}
    write_json(folder / HEAD_FILE, facts)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def add_head(trunk: LoadedModel, config: Mapping[str, Any], folder: Path) -> tuple[LoadedModel, dict[str, Any]]:
    """The trunk with the MTP layers of `folder` in its own dtype, and the config that says so.

    `CheckpointError`, one sentence, for a head that is damaged, or that was trained for another model.
    """
    facts = read_json(folder / HEAD_FILE)
    count = facts.get("num_mtp_layers") if isinstance(facts, dict) else None
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(f"{folder / HEAD_FILE} has num_mtp_layers {count!r}; it must be a number above 0.")
    if trunk.family.num_mtp_layers:
        raise CheckpointError(f"{trunk.folder} has {trunk.family.num_mtp_layers} MTP layers already.")
    found = fingerprint(trunk.family, trunk.weights)
    if facts.get("trunk_fingerprint") != found:
        raise CheckpointError(f"{folder} was trained for {facts.get('trunk')!r}, and {trunk.folder} is another model.")
    config = {**config, NUM_MTP_LAYERS_NAMES[0]: count}
    family = family_from_config(config)
    with SafetensorsReader(folder) as reader:
        layers = assemble(MtpLayers(family), reader, trunk.dtype)
    ranking = trunk.tokens_by_rank or read_ranking(folder, family.vocab_size)
    return replace(trunk, family=family, weights={**trunk.weights, **layers}, tokens_by_rank=ranking), config


def fingerprint(family: ModelFamily, weights: Weights) -> str:
    """What tells two models of one config apart: a hash of some rows of each one's embedding, as bfloat16 has them."""
    first = next(spec for spec in family.tensors() if spec.path == ("embedding",))
    rows = np.asarray(get(weights, first.path)[:64]).astype(np.float32)
    # A bfloat16 is the upper half of a float32, and the fingerprint does not depend on what the model was loaded in.
    rounded = (rows.view(np.uint32) + 0x7FFF + ((rows.view(np.uint32) >> 16) & 1)) >> 16
    return hashlib.sha256(rounded.astype("<u2").tobytes()).hexdigest()


@dataclass(frozen=True)
class MtpLayers:
    """The MTP layers of a family. Satisfies `models.api.NamedTensors`."""

    family: ModelFamily

    @property
    def name(self) -> str:
        """The family's."""
        return self.family.name

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Theirs alone."""
        return tuple(spec for spec in self.family.tensors() if spec.path[0] == MTP_ROOT)

    def duplicates(self) -> Mapping[str, str]:
        """None: embedding and head are the model's."""
        return {}

    def ignored_tensors(self) -> tuple[str, ...]:
        """None."""
        return ()
