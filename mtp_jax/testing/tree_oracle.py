"""What a tree of drafts must be, by definition: level by level, in double precision, without any engine.

    scored = score_tree(family.plain_draft_logits, request, text, shape, draft_len=3)
    check_tree(scored, record.drafts, record.parents, shape)

A drafter computes in single precision, so nodes are compared by their scores and not by their places.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mtp_jax.core.topology import Tree
from mtp_jax.engine.requests import Request
from mtp_jax.testing.checks import CheckFailed
from mtp_jax.testing.oracle import NextLogits, edited_logits, filtered_logits, log_softmax, target_noise_at

_TOLERANCE = 1e-3  # of a log score: a sum of a few logarithms in single precision


@dataclass(frozen=True)
class ScoredNode:
    """A draft that was scored: the tokens that lead to it, its own last, and the log of its score."""

    path: tuple[int, ...]
    log_score: float


def score_tree(
    draft_logits: NextLogits,
    request: Request,
    text: Sequence[int],
    shape: Tree,
    *,
    draft_len: int,
    is_coupled: bool = True,
) -> list[ScoredNode]:
    """All continuations of `text` that are scored, level by level; see `proposers.dynamic_tree`.

    >>> from mtp_jax.core.config import SamplingParams
    >>> request = Request("a", (1,), SamplingParams(temperature=0), seed=0)
    >>> law = lambda tokens: np.log(np.array([0.5, 0.25, 0.25]))
    >>> [(n.path, round(n.log_score, 2)) for n in score_tree(law, request, (1,), Tree(2, 1, 2), draft_len=2)]
    [((0,), -0.69), ((0, 0), -1.39)]
    """
    scored: list[ScoredNode] = []
    frontier = [ScoredNode((), 0.0)]
    for level in range(draft_len):
        last = [child for node in frontier for child in _children(draft_logits, request, text, node, shape, is_coupled)]
        scored += last
        frontier = sorted(last, key=lambda node: -node.log_score)[: shape.topk] if level + 1 < draft_len else []
    return scored


def check_tree(scored: Sequence[ScoredNode], drafts: Sequence[int], parents: Sequence[int], *, is_whole: bool) -> None:
    """Raises `CheckFailed` unless every draft was scored, parents come first and scores fall.

    `is_whole`: the slot had room for the whole tree, so that the drafts are the best of all. Where it had not, the
    drafter may have gone on from fewer nodes.
    """
    by_path = {node.path: node.log_score for node in scored}
    paths: list[tuple[int, ...]] = [()]
    for draft, parent in zip(drafts, parents, strict=True):
        paths.append((*paths[parent], draft))
    unknown = [path for path in paths[1:] if path not in by_path]
    if unknown:
        raise CheckFailed(f"drafts {unknown[0]} are not among the likeliest continuations")
    scores = [by_path[path] for path in paths[1:]]
    if any(later > earlier + _TOLERANCE for earlier, later in itertools.pairwise(scores)):
        raise CheckFailed(f"the drafts' scores {scores} do not fall")
    best = sorted(by_path.values(), reverse=True)[: len(scores)]
    if is_whole and not np.allclose(scores, best, rtol=0, atol=_TOLERANCE):
        raise CheckFailed(f"the drafts' scores are {scores}; the best ones are {best}")


def _children(
    draft_logits: NextLogits, request: Request, text: Sequence[int], node: ScoredNode, shape: Tree, is_coupled: bool
) -> list[ScoredNode]:
    so_far = [*text, *node.path]
    scores_V = _scores(draft_logits(so_far), request, so_far) if is_coupled else draft_logits(so_far)
    chances_V = log_softmax(scores_V)
    likeliest = np.argsort(-scores_V, kind="stable")[: shape.topk]
    return [ScoredNode((*node.path, int(x)), node.log_score + float(chances_V[x])) for x in likeliest]


def _scores(logits_V: Float[np.ndarray, " V"], request: Request, text: Sequence[int]) -> Float[np.ndarray, " V"]:
    edited_V = edited_logits(logits_V, request, text)
    if request.params.temperature == 0:
        return edited_V
    return filtered_logits(edited_V, request.params) + target_noise_at(request.seed, len(text), len(logits_V))
