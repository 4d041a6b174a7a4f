"""What drafts must be worth: break-even acceptance, and the best draft length for a given one.

A step with K drafts brings 1 + a_1 + a_1 a_2 + ... tokens of a slot, a_j being the share of drafts at position j that
stand if all before them do.
"""

from collections.abc import Sequence


def expected_tokens(rates: Sequence[float]) -> float:
    """Tokens that a step brings a slot, with one conditional rate a draft.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    total, reach = 1.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total


def break_even(draft_len: int, cost: float) -> float | None:
    """The rate at which drafting earns nothing: `draft_len` drafts in a step `cost` times as long as one without.

    The same rate at every position. None: not even if all drafts stood.

    >>> round(break_even(1, 1.25), 6)
    0.25
    >>> break_even(2, 3.5) is None
    True
    """
    if cost > draft_len + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * draft_len) < cost else (low, middle)
    return high if cost > 1 else 0.0


def best_draft_len(step_s: Sequence[float], rates: Sequence[float]) -> int:
    """The length with most tokens a second; `step_s[K]` is the time of a step with K drafts. The shortest of equals.

    >>> best_draft_len([1.0, 1.1, 1.9], [0.8, 0.8])
    1
    """
    return max(range(len(step_s)), key=lambda k: expected_tokens(rates[:k]) / step_s[k])
