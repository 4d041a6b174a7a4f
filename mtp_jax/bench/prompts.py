"""Prompts for benchmarks: a few built-in lines, or a file of them."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mtp_jax.core.errors import ConfigError

Prompt = str | list[int]

BUILT_IN: tuple[Prompt, ...] = (
    "def fibonacci(n):\n",
    "The history of the city begins with",
    "class Stack:\n    def __init__(self):\n",
    "To install the package, run the following command:",
    "import json\n\ndef read_config(path):\n",
    "There was once a man who",
    "Returns a list of the numbers from",
    "for line in file:\n",
)


def read_prompts(file: Path) -> list[Prompt]:
    """One prompt a line of JSONL: `{"prompt": text or token ids}`, or `{"turns": [text, ...]}` (its first turn)."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"The prompts in {file} cannot be read: {error.strerror}.") from error
    prompts = [_prompt_of(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{file} holds no prompts; it needs one JSON object a line.")
    return prompts


def tokens_of(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, count: int) -> tuple[tuple[int, ...], ...]:
    """The first `count` prompts as token ids, begun again from the first when there are fewer."""
    chosen = itertools.islice(itertools.cycle(prompts), count)
    return tuple(_tokens(prompt, tokenizer) for prompt in chosen)


def _tokens(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    if tokenizer is None:
        raise ConfigError("The prompts are text and this model has no tokenizer; give lists of token ids.")
    return tuple(tokenizer.encode(prompt).ids)


def _prompt_of(line: str, place: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error.msg}.") from error
    if isinstance(value, dict):
        prompt = value.get("prompt", next(iter(value.get("turns") or ()), None))
        if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
            return prompt
    raise ConfigError(f'{place} needs "prompt" (text or a list of token ids) or "turns" (a list of texts).')
