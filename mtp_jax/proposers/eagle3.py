"""Drafting with an Eagle3 drafter (arXiv 2503.01840): recursive drafting, fed with features of several target layers.

Pages, catching up and recursion are those of one MTP layer applied again and again (`mtp_eagle`): the entry at position
i pairs the features of i with token i + 1, and is made anew from the target's own states once its position is final;
while drafting, the drafter's hidden state stands in for features that are not there yet. What differs is the width of
what is carried, and that drafts come out of a vocabulary of the drafter's own, by the noise of the target's ids.
"""

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.with_drafter import WithDrafter
from mtp_jax.proposers.drawing import DraftSampling, draft_sampling_of
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.mtp import Mtp, mtp_eagle


def eagle3(draft_sampling: DraftSampling = "coupled") -> Mtp:
    """Any draft length from the drafter's one layer."""
    return mtp_eagle(draft_sampling, _drafter_width)


def _drafter_width(family: ModelFamily) -> int:
    if not isinstance(family, WithDrafter):
        raise InvariantError(f"Eagle3 drafts for a family with a drafter, and {family.name} has none")
    return family.drafter.hidden_size


def _lacks_drafter(family: ModelFamily, spec: SpeculativeConfig) -> str | None:
    if isinstance(family, WithDrafter):
        return None
    return f"method {spec.method!r} needs a drafter; give its checkpoint's folder as model of the speculative_config."


EAGLE3 = Method(
    lambda family, spec: eagle3(draft_sampling_of(spec)),
    options=frozenset({"draft_sampling", "model"}),
    problem=_lacks_drafter,
)
