"""Which lines of the input a process answers: those of its data shards, by their number."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Share `index` of `count`: the lines whose number falls on one of `shards`, of `num_shards` in all.

    Processes that hold the same data shards have the same share, and one of them writes (`is_writer`).

    >>> share = Share(index=1, count=2, shards=(1,), num_shards=2)
    >>> [number for number in range(6) if share.takes(number)]
    [1, 3, 5]
    """

    index: int = 0
    count: int = 1
    shards: tuple[int, ...] = (0,)
    num_shards: int = 1
    is_writer: bool = True

    def takes(self, number: int) -> bool:
        """Whether the line with this number belongs to it."""
        return number % self.num_shards in self.shards

    @property
    def label(self) -> str:
        """For names of files."""
        return f"{self.index:05d}-of-{self.count:05d}"


def shares_of(shards_of_process: Sequence[tuple[int, ...]], num_shards: int) -> list[Share]:
    """The share of each process of a mesh, from the data shards that each of them schedules.

    >>> [(share.index, share.is_writer) for share in shares_of([(0,), (0,), (1,), (1,)], 2)]
    [(0, True), (0, False), (1, True), (1, False)]
    """
    groups = sorted(set(shards_of_process))
    return [
        Share(
            groups.index(shards), len(groups), shards, num_shards, is_writer=shards not in shards_of_process[:process]
        )
        for process, shards in enumerate(shards_of_process)
    ]
