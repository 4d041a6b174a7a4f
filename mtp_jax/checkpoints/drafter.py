"""Drafters with a checkpoint of their own: read, checked against the target, and joined with it."""

from pathlib import Path

import numpy as np
from jaxtyping import Int

from mtp_jax.checkpoints.assemble import assemble
from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.checkpoints.folders import read_config
from mtp_jax.checkpoints.safetensors_io import SafetensorsReader
from mtp_jax.models.api import ModelFamily, TappedFamily, Weights
from mtp_jax.models.eagle3 import TOKEN_MAP, TOKEN_MASK, Eagle3Drafter, eagle3_drafter
from mtp_jax.models.with_drafter import WithDrafter


def add_drafter(
    family: ModelFamily, weights: Weights, folder: str | Path, *, dtype: str
) -> tuple[WithDrafter, Weights]:
    """The target joined with the Eagle3 drafter of `folder` (config.json and safetensors, as published), in `dtype`.

    `CheckpointError` or `ConfigError`, one sentence, for a drafter that is damaged or does not fit the target.

    >>> add_drafter(loaded.family, loaded.weights, "EAGLE3-LLaMA3.1", dtype="bfloat16")     # doctest: +SKIP
    """
    if not isinstance(family, TappedFamily):
        raise CheckpointError(f"family {family.name!r} hands out no layers, which Eagle3 drafters are fed with.")
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"model {str(folder)!r} of the speculative_config {found}; give a drafter's folder.")
    config = read_config(folder)
    with SafetensorsReader(folder, integers=(TOKEN_MAP, TOKEN_MASK)) as reader:
        drafter = eagle3_drafter(config, reader.tensors.keys(), family)
        own = assemble(drafter, reader, dtype)
        _check_token_map(drafter, reader)
    joined = WithDrafter(family, drafter)
    return joined, joined.join(weights, own)


def _check_token_map(drafter: Eagle3Drafter, reader: SafetensorsReader) -> None:
    """`CheckpointError` unless the map names distinct tokens of the target, the same as the mask does."""
    if not drafter.has_token_map:
        return
    offsets_N = reader.read(TOKEN_MAP).astype(np.int64)
    ids_N = np.arange(len(offsets_N)) + offsets_N
    what = f"{reader.tensors[TOKEN_MAP].file} has tensor {TOKEN_MAP!r}"
    outside = np.flatnonzero((ids_N < 0) | (ids_N >= drafter.vocab_size))
    if len(outside):
        first = int(outside[0])
        raise CheckpointError(
            f"{what}, which takes draft id {first} to token {ids_N[first]}; the target's ids go from 0 to "
            f"{drafter.vocab_size - 1} (the tensor holds differences, not ids)."
        )
    if len(np.unique(ids_N)) < len(ids_N):
        raise CheckpointError(f"{what}, which takes two draft ids to the same token.")
    if TOKEN_MASK in reader.tensors:
        _check_mask(ids_N, reader, drafter.vocab_size)


def _check_mask(ids_N: Int[np.ndarray, " N"], reader: SafetensorsReader, vocab_size: int) -> None:
    mask_V = reader.read(TOKEN_MASK).astype(bool)
    file = reader.tensors[TOKEN_MASK].file
    if mask_V.shape != (vocab_size,):
        raise CheckpointError(
            f"{file} has tensor {TOKEN_MASK!r} of shape {list(mask_V.shape)}; the target asks for [{vocab_size}]."
        )
    differing = np.setxor1d(np.flatnonzero(mask_V), ids_N)
    if len(differing):
        raise CheckpointError(
            f"{file} has tensors {TOKEN_MASK!r} and {TOKEN_MAP!r} that disagree on token {differing[0]}; "
            "they must name the same tokens."
        )
