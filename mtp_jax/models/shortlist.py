"""A draft shortlist: drafters speak over the N most frequent tokens only, with the head's rows for those alone.

A draft pass of one MTP layer reads little but the head: over 128 k tokens that is more than the layer. The rows of the
shortlist are copied once, at start; the target's head stays as it is, so what is emitted stays as it is: a token that
is not in the list is just never drafted.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from mtp_jax.core.config import MeshConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.params import get
from mtp_jax.ops.placement import AxisRules

SHORTLIST = "draft_shortlist"
"""Key of a shortlist in the weights, beside the family's own."""


def with_shortlist(family: ModelFamily, weights: Weights, tokens_by_rank: Any, size: int) -> Weights:
    """The weights and, beside them, the head's rows for the first `size` of `tokens_by_rank`, by token id.

    `tokens_by_rank`: token ids, the most frequent first, as a sequence or an array.

    `ConfigError` where there is no ranking, or it is too short, or it is not of this vocabulary.
    """
    if tokens_by_rank is None:
        raise ConfigError(
            f"draft_vocab_size={size} needs a ranking of the model's tokens, and there is none beside the weights; "
            "make one with mtp-jax rank-tokens."
        )
    check_ranking(tokens_by_rank, family.vocab_size)
    if size > len(tokens_by_rank):
        raise ConfigError(f"draft_vocab_size is {size}; the ranking has {len(tokens_by_rank)} tokens.")
    ids_N = np.sort(np.array(tokens_by_rank[:size], np.int32))
    rows_ND = jnp.take(get(weights, family.head_path), ids_N, axis=0)
    return {**weights, SHORTLIST: {"ids": jnp.array(ids_N), "head": rows_ND}}


def check_ranking(tokens_by_rank: Any, vocab_size: int) -> None:
    """`ConfigError` unless the tokens are different ones of the vocabulary."""
    ids = np.array(tokens_by_rank)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(f"a ranking must be one row of token ids; it is {ids.ndim}-dimensional {ids.dtype}.")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ConfigError(f"the ranking of tokens goes from {ids.min()} to {ids.max()}; ids are 0 to {vocab_size - 1}.")
    if len(np.unique(ids)) != len(ids):
        raise ConfigError("the ranking of tokens names a token twice.")


def check_shortlist(weights: Weights, size: int | None, mesh: MeshConfig) -> None:
    """`ConfigError` unless the weights have a shortlist of just this size (None: have none) that the mesh can split."""
    found = len(weights[SHORTLIST]["ids"]) if SHORTLIST in weights else None
    if found != size:
        raise ConfigError(f"draft_vocab_size is {size}, and the weights have one of {found}; see with_shortlist.")
    if size is not None and size % mesh.num_devices != 0:
        raise ConfigError(
            f"draft_vocab_size is {size}; mesh={{'data': {mesh.data}, 'model': {mesh.model}}} needs a multiple of "
            f"{mesh.num_devices}."
        )


def shortlist_ids(weights: Weights) -> Int[Array, " N"] | None:
    """The token of each column of the drafters' logits; None where they speak over the whole vocabulary."""
    return weights[SHORTLIST]["ids"] if SHORTLIST in weights else None


def drafting_weights(family: ModelFamily, weights: Weights) -> Weights:
    """The weights as `draft_unembed` is to see them: with the shortlist's rows for a head."""
    if SHORTLIST not in weights:
        return weights
    return _replaced(weights, family.head_path, weights[SHORTLIST]["head"])


def shortlist_specs(family: ModelFamily, rules: AxisRules) -> Weights:
    """How a shortlist is split over a mesh: its rows as the head's are."""
    head = next(tensor for tensor in family.tensors() if tensor.path == family.head_path)
    return {SHORTLIST: {"ids": rules.spec(None), "head": rules.spec(*head.axes)}}


def _replaced(tree: Weights, path: tuple[str, ...], leaf: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {**tree, path[0]: leaf}
    return {**tree, path[0]: _replaced(tree[path[0]], path[1:], leaf)}
