"""Texts that a model wrote, one a row: its prompt, what came after it, and nothing else.

Rows keep what a long row of tokens loses: where a prompt ends, and that nothing stands before it. So the hidden states
of a row are those that the model had when it wrote it.
"""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from mtp_jax.core.errors import ConfigError

ROWS_SUFFIX = ".npz"
_ARRAYS = ("tokens", "prompt_lens", "lengths")


@dataclass(frozen=True, eq=False)
class TextRows:
    """`tokens_NS`: N texts, each from column 0 on, zeros after it. `lengths_N` counts the prompt's tokens, too."""

    tokens_NS: Int[np.ndarray, "N S"]
    prompt_lens_N: Int[np.ndarray, " N"]
    lengths_N: Int[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the model wrote."""
        return int((self.lengths_N - self.prompt_lens_N).sum())

    def at(self, indices: Sequence[int] | Int[np.ndarray, " M"]) -> "TextRows":
        """The rows of these numbers, in this order."""
        chosen_M = np.asarray(indices, np.int64)
        return TextRows(self.tokens_NS[chosen_M], self.prompt_lens_N[chosen_M], self.lengths_N[chosen_M])

    def answers(self) -> list[np.ndarray]:
        """What the model wrote, row by row."""
        ends = zip(self.tokens_NS, self.prompt_lens_N, self.lengths_N, strict=True)
        return [row[start:end] for row, start, end in ends]


def rows_of(texts: Iterable[tuple[Sequence[int], Sequence[int]]], width: int) -> TextRows:
    """Rows of (prompt, answer) pairs. `ConfigError` for one that is longer than `width`.

    >>> rows_of([([5, 6], [7])], 4).tokens_NS.tolist()
    [[5, 6, 7, 0]]
    """
    pairs = [(list(prompt), list(answer)) for prompt, answer in texts]
    tokens_NS = np.zeros((len(pairs), width), np.int32)
    for row_S, (prompt, answer) in zip(tokens_NS, pairs, strict=True):
        text = prompt + answer
        if len(text) > width:
            raise ConfigError(f"a text has {len(text)} tokens; a row holds {width}.")
        row_S[: len(text)] = text
    prompt_lens_N = np.array([len(prompt) for prompt, _ in pairs], np.int32)
    return TextRows(tokens_NS, prompt_lens_N, prompt_lens_N + [len(answer) for _, answer in pairs])


def write_rows(file: Path, rows: TextRows) -> None:
    """Writes `file` (`.npz`), compressed; ids must be below 65536."""
    if rows.tokens_NS.max(initial=0) >= 1 << 16:
        raise ConfigError(f"{file}: token ids go to {rows.tokens_NS.max()}; the file holds 0 to 65535.")
    arrays = (rows.tokens_NS.astype(np.uint16), rows.prompt_lens_N, rows.lengths_N)
    np.savez_compressed(file, **dict(zip(_ARRAYS, arrays, strict=True)))


def read_rows(file: Path, vocab_size: int) -> TextRows:
    """The rows of a file. `ConfigError` for one that is damaged, or that another model's tokenizer wrote."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            tokens_NS, prompt_lens_N, lengths_N = (arrays[name].astype(np.int32) for name in _ARRAYS)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} holds no texts in rows: {error}.") from None
    if tokens_NS.ndim != 2 or not len(tokens_NS) == len(prompt_lens_N) == len(lengths_N):
        raise ConfigError(f"{file} has tokens {list(tokens_NS.shape)} for {len(lengths_N)} lengths.")
    if len(lengths_N) == 0:
        raise ConfigError(f"{file} has no text in it.")
    if not ((prompt_lens_N >= 1) & (prompt_lens_N <= lengths_N) & (lengths_N <= tokens_NS.shape[1])).all():
        raise ConfigError(f"{file} has prompts that are empty or longer than their texts, or texts beyond their rows.")
    if tokens_NS.max() >= vocab_size:
        raise ConfigError(f"{file} has token id {tokens_NS.max()}; the model's go to {vocab_size - 1}.")
    return TextRows(tokens_NS, prompt_lens_N, lengths_N)


def joined(parts: Sequence[TextRows]) -> TextRows:
    """The rows of all parts, widened to the widest."""
    width = max(part.tokens_NS.shape[1] for part in parts)
    tokens = [np.pad(part.tokens_NS, ((0, 0), (0, width - part.tokens_NS.shape[1]))) for part in parts]
    return TextRows(
        np.concatenate(tokens),
        np.concatenate([part.prompt_lens_N for part in parts]),
        np.concatenate([part.lengths_N for part in parts]),
    )
