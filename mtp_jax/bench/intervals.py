"""A median with what can be said of it, whatever the scatter looks like."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 6
"""Values that an interval takes: the smallest and the largest of five hold the median in 94% of cases only."""


@dataclass(frozen=True)
class Interval:
    """The median of a sample, and the interval that holds the true median with at least 95% confidence."""

    median: float
    low: float
    high: float

    def over(self, value: float) -> "Interval":
        """All three as parts of a positive value."""
        return Interval(self.median / value, self.low / value, self.high / value)


def median_interval(values: Sequence[float]) -> Interval:
    """Of independent values. `ValueError` for fewer than `FEWEST`.

    The bounds are the values of rank k from below and from above, with the largest k such that fewer than k values lie
    on one side of the true median with a probability of at most 2.5%: each value does so by a fair coin.

    >>> median_interval([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    Interval(median=3.5, low=1.0, high=100.0)
    """
    count = len(values)
    if count < FEWEST:
        raise ValueError(f"{count} values; an interval takes at least {FEWEST}")
    rank, below = 0, 1.0
    while below <= 0.025 * 2**count:
        rank += 1
        below += math.comb(count, rank)
    ordered = sorted(values)
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[count - rank])
