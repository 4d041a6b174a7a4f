"""Plain-text tables for people."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right. The first row is the head.

    >>> print(table([["", "ms"], ["plain", "5.1"]]))
            ms
    plain  5.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def shares(values: Sequence[float]) -> str:
    """Shares to two digits: "0.71 0.45 0.30", or "-" when there are none."""
    return " ".join(f"{value:.2f}" for value in values) or "-"


def step_counts(draft_lens: dict[int, int]) -> str:
    """How many steps ran at each draft length: "3 in 40 steps, 0 in 2"; "-" when there was none."""
    most_first = sorted(draft_lens.items(), key=lambda entry: -entry[1])
    parts = [f"{draft_len} in {count}" for draft_len, count in most_first]
    return ", ".join([f"{parts[0]} steps", *parts[1:]]) if parts else "-"
