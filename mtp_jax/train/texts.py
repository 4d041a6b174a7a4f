"""What a user trains or measures on, as one row of tokens: texts, a packed token file, or results of `run-batch`."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.train.data import read_tokens

PACKED_SUFFIX = ".xz"
RESULTS_SUFFIX = ".jsonl"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Files of a folder that are read; any single file is read as text."""


def tokens_in(path: Path, family: ModelFamily, tokenizer: Tokenizer | None) -> np.ndarray:
    """The tokens of `path`, int32. The files of a folder, sub-folders too, stand in the order of their names.

    The model's end-of-text token, where it has one, stands between files. Results of `run-batch` are the model's own
    samples, each after its prompt (`"return_token_ids": true`). `ConfigError` for what cannot be read, is no UTF-8
    text, has no text in it, or has token ids that the model lacks.
    """
    if path.suffix == PACKED_SUFFIX:
        tokens = _packed(path)
    elif path.suffix == RESULTS_SUFFIX:
        tokens = _samples(path, family.eos_token_ids[:1])
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


def _samples(file: Path, separator: tuple[int, ...]) -> np.ndarray:
    """Prompts and completions, token for token as they were drawn; lines that failed have none."""
    rows: list[int] = []
    for number, line in enumerate(_text_of(file).splitlines(), start=1):
        try:
            choices = json.loads(line)["response"]["body"].get("choices", ())
            for choice in choices:
                rows += choice["prompt_token_ids"] + choice["token_ids"]
                if tuple(rows[-1:]) != separator:
                    rows += separator
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f'{file}, line {number}, is no result of run-batch with "return_token_ids": true in its body.'
            ) from None
    if not rows:
        raise ConfigError(f"{file} has no sample in it.")
    return np.array(rows, np.int32)


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
