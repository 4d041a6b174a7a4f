"""A model's tokens by how frequent they are, in a file beside its weights: what a draft shortlist is cut from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.shortlist import check_ranking

RANKING_FILE = "token_ranking.npy"


def rank_tokens(tokens_T: Int[np.ndarray, " T"], vocab_size: int) -> Int[np.ndarray, " V"]:
    """Every token of the vocabulary, the most frequent of the text first, of equals the lowest id.

    >>> rank_tokens(np.array([3, 1, 3, 0, 0]), 5).tolist()
    [0, 3, 1, 2, 4]
    """
    counts_V = np.bincount(tokens_T, minlength=vocab_size)
    return np.argsort(-counts_V, kind="stable").astype(np.int32)


def write_ranking(folder: Path, tokens_by_rank: Sequence[int] | Int[np.ndarray, " N"]) -> Path:
    """Writes the file into a model folder, whole or not at all; its path."""
    file = folder / RANKING_FILE
    partial = file.with_suffix(".partial.npy")
    try:
        np.save(partial, np.asarray(tokens_by_rank, np.int32), allow_pickle=False)
        partial.replace(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return file


def read_ranking(folder: Path, vocab_size: int) -> tuple[int, ...] | None:
    """The ranking of a model folder; None where there is none, `CheckpointError` where it is unfit."""
    file = folder / RANKING_FILE
    if not file.exists():
        return None
    try:
        ids = np.load(file, allow_pickle=False)
        check_ranking(ids, vocab_size)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file} cannot be read as an array of numpy: {error}.") from None
    return tuple(ids.tolist())
