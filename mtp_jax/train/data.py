"""Packed token files and the batches drawn from them. A batch is a function of (seed, step) and of nothing else."""

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mtp_jax.core.errors import ConfigError

# Tokens are pairs of bytes: with position and literal bits telling the two apart, xz gains about 4 %.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


def write_tokens(path: Path, sequences: Iterable[Sequence[int] | np.ndarray], *, separator: int) -> int:
    """Writes token sequences, each with `separator` in front and one at the very end; returns the number of tokens.

    The file is xz-compressed little-endian uint16, so ids must be below 65536.
    """
    packed: list[np.ndarray] = []
    for sequence in sequences:
        tokens = np.asarray([separator, *sequence], np.int64)
        if tokens.min() < 0 or tokens.max() >= 1 << 16:
            raise ConfigError(f"{path}: token ids go from {tokens.min()} to {tokens.max()}; the file holds 0 to 65535.")
        packed.append(tokens.astype("<u2"))
    packed.append(np.asarray([separator], "<u2"))
    tokens = np.concatenate(packed)
    with lzma.open(path, "wb", filters=_FILTERS) as file:
        file.write(tokens.tobytes())
    return len(tokens)


def read_tokens(path: Path) -> np.ndarray:
    """All tokens of a file written by `write_tokens`, uint16."""
    try:
        with lzma.open(path, "rb") as file:
            return np.frombuffer(file.read(), "<u2").astype(np.uint16, copy=False)
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"{path} is not a complete token file: {error}.") from None


@dataclass(frozen=True, eq=False)
class Batches:
    """Training windows of `window` tokens from one long row of tokens, `batch_size` a step.

    An epoch cuts the tokens into windows at an offset of its own and visits each window once, in an order of its own;
    both come from (seed, epoch). So `at(step)` needs no state, and training resumes at any step with the same batches.

    >>> batches = Batches(np.arange(100, dtype=np.uint16), window=10, batch_size=2, seed=0)
    >>> batches.at(3).shape, bool((batches.at(3) == batches.at(3)).all())
    ((2, 10), True)
    """

    tokens: np.ndarray
    window: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"the data has {len(self.tokens)} tokens; a batch of {self.batch_size} windows of {self.window} needs "
                f"at least {(self.batch_size + 1) * self.window}."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the tokens."""
        return (len(self.tokens) // self.window - 1) // self.batch_size

    def at(self, step: int) -> np.ndarray:
        """The int32 [batch_size, window] batch of `step` (0-based)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        offset, order = _epoch(self.seed, epoch, self.window, len(self.tokens) // self.window - 1)
        rows = order[index * self.batch_size : (index + 1) * self.batch_size]
        starts = offset + rows[:, None] * self.window
        return self.tokens[starts + np.arange(self.window)].astype(np.int32)


@lru_cache(maxsize=4)  # every step of an epoch asks again
def _epoch(seed: int, epoch: int, window: int, num_windows: int) -> tuple[int, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    return int(rng.integers(window)), rng.permutation(num_windows)


def windows(tokens: np.ndarray, window: int, count: int | None = None) -> np.ndarray:
    """The first `count` (None: all) consecutive windows of held-out tokens, int32 [N, window].

    >>> windows(np.arange(10), 4).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    available = len(tokens) // window
    if available < (count or 1):
        raise ConfigError(f"the data has {len(tokens)} tokens; {count or 1} windows of {window} were asked for.")
    count = count or available
    return tokens[: count * window].reshape(count, window).astype(np.int32)
