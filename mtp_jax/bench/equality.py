"""Whether two runs of a workload emitted the same tokens, and how near a tie the first difference was."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtp_jax.bench.measure import Run, Variant, Workload, run_once


@dataclass(frozen=True)
class Difference:
    """The first position at which one request's tokens differ from plain decoding's; None past an end."""

    request: int
    position: int
    token: int | None
    plain_token: int | None


def differences(run: Run, plain: Run) -> list[Difference]:
    """One per request whose tokens are not exactly plain decoding's."""
    return [
        Difference(request, position, _at(tokens, position), _at(plain_tokens, position))
        for request, (tokens, plain_tokens) in enumerate(zip(run.tokens, plain.tokens, strict=True))
        if (position := first_difference(tokens, plain_tokens)) is not None
    ]


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position where two sequences differ, an end included; None when they are equal.

    >>> first_difference([5, 6, 7], [5, 9, 7]), first_difference([5, 6], [5, 6, 7]), first_difference([5], [5])
    (1, 2, None)
    """
    for position, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return position
    return None if len(tokens) == len(others) else min(len(tokens), len(others))


def top_two_margin(plain: Variant, workload: Workload, difference: Difference) -> float | None:
    """Plain decoding once more: by how much its best token led the second there, in log-probability.

    A margin near the rounding of the arithmetic is a tie that another order of additions may break either way; a wide
    one is a fault. None where plain decoding had ended.
    """
    with_logprobs = replace(workload, params=replace(workload.params, logprobs=2))
    policy = plain.policy or plain.llm.engine.scheduler.policy
    run, _ = run_once(plain.llm, with_logprobs, policy)
    logprobs = run.logprobs[difference.request]
    if difference.position >= len(logprobs):
        return None
    best, second = (logprob for _, logprob in logprobs[difference.position].top[:2])
    return best - second


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
