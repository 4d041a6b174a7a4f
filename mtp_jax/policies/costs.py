"""Step costs measured at warm-up, with what is certainly noise taken out."""

from collections.abc import Mapping


def never_dearer(cost_s: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Costs by (slots, draft length) in which no step is dearer than one with as many slots and drafts or more.

    A larger step does all that a smaller one does, and what disturbs a measurement only adds to it: so a larger step's
    time bounds a smaller one's from above. Without this one unlucky measurement of K = 0 would make drafting look free.

    >>> never_dearer({(1, 0): 1.9, (1, 1): 1.7, (8, 0): 1.8, (8, 1): 2.0})
    {(1, 0): 1.7, (1, 1): 1.7, (8, 0): 1.8, (8, 1): 2.0}
    """
    return {
        (slots, draft_len): min(
            cost for (slots_2, draft_len_2), cost in cost_s.items() if slots_2 >= slots and draft_len_2 >= draft_len
        )
        for slots, draft_len in cost_s
    }
