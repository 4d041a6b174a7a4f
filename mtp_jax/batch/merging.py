"""From parts to results in the order of the input: one file for the whole job, or one for each share.

Whichever process ends last merges: none waits for another, and none is special. Two that end at the same moment may
both merge. Each writes the same bytes, and one that finds parts gone, the other being quicker, has nothing left to do.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from etils import epath
from jaxtyping import Int64

from mtp_jax.batch import storage
from mtp_jax.batch.shares import Share
from mtp_jax.batch.store import PartStore, entries
from mtp_jax.core.errors import ConfigError

_PARTS_IN_MEMORY = 256
"""Parts hold neighbouring lines, so each is read about once however many there are."""


def shard_file(output: epath.Path, share: Share) -> epath.Path:
    """Where the results of one share go when they are not merged: `results-00000-of-00004.jsonl`."""
    return output.with_name(f"{output.stem}-{share.label}{output.suffix}")


def merge(store: PartStore, num_lines: int) -> None:
    """All results in the order of the input as the output file, which appears whole; the parts go.

    `ConfigError` if fewer lines than `num_lines` have a result: that would be a job which is not at its end.
    """
    try:
        _write_sorted(store, store.output, lambda _: True, num_lines)
        store.remove()
    except (FileNotFoundError, ConfigError):
        if not storage.exists(store.output):
            raise


def write_shard(store: PartStore, num_lines: int) -> None:
    """The results of this process's share alone, in the order of the input."""
    share = store.share
    num_own = sum(share.takes(number) for number in range(num_lines))
    _write_sorted(store, shard_file(store.output, share), share.takes, num_own)


def _write_sorted(store: PartStore, target: epath.Path, is_wanted: Callable[[int], bool], num_lines: int) -> None:
    parts = store.parts()
    places = _places(parts, is_wanted)
    if len(places) < num_lines:
        raise ConfigError(f"{num_lines - len(places)} lines have no result yet in {store.folder}; go on with --resume.")
    read = lru_cache(_PARTS_IN_MEMORY)(storage.read_whole)
    with storage.new_file(target, "; go on with --resume", room=store.folder) as merged:
        for part, start, length in places:
            merged.write(read(parts[part])[start : start + length])


def _places(parts: list[epath.Path], is_wanted: Callable[[int], bool]) -> Int64[np.ndarray, "L 3"]:
    """(part, first byte, bytes) of each result, by line number; of a line that has two the first one's."""
    tables = [np.zeros((0, 4), np.int64)]
    tables += [np.array([*_rows(index, part, is_wanted)], np.int64).reshape(-1, 4) for index, part in enumerate(parts)]
    table = np.concatenate(tables)
    _, first = np.unique(table[:, 0], return_index=True)
    return table[first, 1:]


def _rows(index: int, part: epath.Path, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, int, int, int]]:
    for number, start, length in entries(storage.read_whole(part)):
        if is_wanted(number):
            yield number, index, start, length
