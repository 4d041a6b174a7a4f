"""What a user trains or measures on, as one row of tokens: a text, a folder of texts, or a packed token file."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.train.data import read_tokens

PACKED_SUFFIX = ".xz"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Files of a folder that are read; any single file is read as text."""


def tokens_in(path: Path, family: ModelFamily, tokenizer: Tokenizer | None) -> np.ndarray:
    """The tokens of `path`, int32. The files of a folder, sub-folders too, stand in the order of their names.

    The model's end-of-text token, where it has one, stands between files. `ConfigError` for what cannot be read, is no
    UTF-8 text, has no text in it, or has token ids that the model lacks.
    """
    if path.suffix == PACKED_SUFFIX:
        tokens = _packed(path)
    elif tokenizer is None:
        raise ConfigError(f"{path} is text and this model has no tokenizer; give a packed token file (.tokens.xz).")
    else:
        tokens = _encoded(_files(path), tokenizer, family.eos_token_ids[:1])
    if tokens.max(initial=0) >= family.vocab_size:
        raise ConfigError(f"{path} has token id {tokens.max()}; the model's go to {family.vocab_size - 1}.")
    return tokens


def _packed(file: Path) -> np.ndarray:
    try:
        return read_tokens(file).astype(np.int32)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(f"{path} holds no text files; those that are read end in {', '.join(TEXT_SUFFIXES)}.")
    return files


def _encoded(files: list[Path], tokenizer: Tokenizer, separator: tuple[int, ...]) -> np.ndarray:
    rows: list[np.ndarray] = []
    for file in files:
        if rows:
            rows.append(np.array(separator, np.int32))
        rows.append(np.array(tokenizer.encode(_text_of(file)).ids, np.int32))
    return np.concatenate(rows)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text.") from error
