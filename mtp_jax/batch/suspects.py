"""Requests that were under way when an engine over several processes died, and what the next start does with them.

Such an engine cannot be built again by one process, so a request that breaks the device ends the job; whatever starts
it again would see it end again. Therefore each process that still can writes down what was under way, and later starts
read that: a request that was there at two deaths runs by itself, before all others, and one that was by itself at two
deaths is not run any more. Twice each time, since a process may also die of something else.

    results.jsonl.parts/died-0003-00001.json        what process 1 knew of the third death
"""

import json
from collections import Counter
from collections.abc import Collection, Container
from dataclasses import dataclass

from mtp_jax.batch.store import PartStore

_DEATHS = 2


@dataclass(frozen=True)
class Suspects:
    """What earlier deaths say. `attempt` is the number that a death of this start would have.

    `alone`: lines to run by themselves; `given_up`: lines that are not to be run.
    """

    attempt: int = 1
    alone: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()

    @property
    def apart(self) -> frozenset[int]:
        """All of them."""
        return frozenset((*self.alone, *self.given_up))

    def record(self, store: PartStore, process: int, lines: Collection[int], *, alone: bool) -> None:
        """Writes down what was under way at a death of this start, as far as this process knows."""
        known = {"alone": alone, "lines": sorted(lines)}
        store.write_beside(f"died-{self.attempt:04d}-{process:05d}.json", json.dumps(known).encode())


def suspects_of(store: PartStore, done: Container[int]) -> Suspects:
    """From what was written at earlier deaths, about lines that are not in `done`.

    All processes of an engine must read the same, so none may write meanwhile.
    """
    in_crowd: set[tuple[int, int]] = set()  # (death, line): several processes may know of one
    by_itself: set[tuple[int, int]] = set()
    deaths = [0]
    for name, data in store.read_beside("died-"):
        death, known = int(name.split("-")[1]), json.loads(data)
        deaths.append(death)
        seen = by_itself if known["alone"] else in_crowd
        seen.update((death, line) for line in known["lines"] if line not in done)
    times_alone = Counter(line for _, line in by_itself)
    times = Counter(line for _, line in in_crowd | by_itself)
    given_up = {line for line, count in times_alone.items() if count >= _DEATHS}
    alone = {line for line, count in times.items() if count >= _DEATHS} - given_up
    return Suspects(max(deaths) + 1, tuple(sorted(alone)), tuple(sorted(given_up)))
