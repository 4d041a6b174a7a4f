"""Drafting with an Eagle3 drafter (arXiv 2503.01840): recursive drafting, fed with features of several target layers.

Pages, catching up and recursion are those of one MTP layer applied again and again (`mtp_eagle`): the entry at position
i pairs the features of i with token i + 1, and is made anew from the target's own states once its position is final;
while drafting, the drafter's hidden state stands in for features that are not there yet. What differs is the width of
what is carried, and that drafts come out of a vocabulary of the drafter's own, by the noise of the target's ids.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from mtp_jax.core.errors import InvariantError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.proposers.drawing import DraftSampling
from mtp_jax.proposers.features import Features, empty_features
from mtp_jax.proposers.mtp import Mtp, mtp_eagle


@dataclass(frozen=True)
class Eagle3(Mtp):
    """Recursive drafting that carries features of the drafter's width. Made by `eagle3`."""

    def init_carry(self, family: ModelFamily, *, num_slots: int, max_draft_len: int, dtype: jnp.dtype) -> Features:
        if not isinstance(family, WithDrafter):
            raise InvariantError(f"Eagle3 drafts for a family with a drafter, and {family.name} has none")
        return empty_features(num_slots, max_draft_len + self.num_layers, family.drafter.hidden_size, dtype)


def eagle3(draft_sampling: DraftSampling = "coupled") -> Eagle3:
    """Any draft length from the drafter's one layer."""
    recursive = mtp_eagle(draft_sampling)
    return Eagle3(recursive.num_layers, recursive.chain, draft_sampling)
