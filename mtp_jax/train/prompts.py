"""Self-distillation: prompts for a chat model to answer or to write on from, as lines for `run-batch`.

    python -m mtp_jax.train.prompts --documents data/documents.jsonl --model MODEL --out OUT --not-in evaluation.txt

`OUT` receives `prompts.jsonl` and `texts.tokens.xz`, the beginnings of documents as they are, to be trained on beside
the answers. Instructions are those of `distillation_prompts.toml`, filled with topics, with passages of the corpus
(`mtp_jax.train.corpus`, training documents only) and with its Python functions. A text that shares a run of
`SHARED_WORDS` words with a file given as `--not-in` is left out, so that what a head is judged by never enters what it
is trained on. The same documents give the same files.
"""

import argparse
import ast
import hashlib
import json
import random
import re
import textwrap
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mtp_jax.checkpoints import load_model
from mtp_jax.core.errors import ConfigError
from mtp_jax.text import tokenizer_of
from mtp_jax.train.data import write_tokens

SHARED_WORDS = 8
"""A run of so many words in common makes a text and an evaluation prompt the same."""
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)
"""Of lines in turn: acceptance is measured on greedy text, and greedy text alone has little variety."""
SHARES = {"function": 6, "code": 2, "write on": 2, "topic": 5, "passage": 4, "problem": 2}
"""How many of each kind in 21 prompts; "function" is a signature and its docstring, to be written on from."""
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def lines(
    documents: Iterable[dict[str, Any]], tokenizer: Tokenizer, foreign: "Foreign", count: int, limits: tuple[int, int]
) -> list[dict[str, Any]]:
    """`count` request lines, kinds mixed evenly. `limits`: most tokens of a prompt, and of what is written on."""
    longest, max_tokens = limits
    makers = _makers(list(documents))
    order = [kind for kind, share in SHARES.items() for _ in range(share)]
    random.Random(0).shuffle(order)
    out: list[dict[str, Any]] = []
    seen: set[str] = set()
    turn = 0
    while len(out) < count:
        prompt = next(makers[order[turn % len(order)]], None)
        turn += 1
        if prompt is None:
            raise ConfigError(f"the documents give {len(out)} prompts; {count} were asked for.")
        if prompt in seen or foreign.shares_with(prompt):
            continue
        if len(prompt) > 8 * longest or len(tokenizer.encode(prompt).ids) > longest:
            continue
        seen.add(prompt)
        temperature = TEMPERATURES[len(out) % len(TEMPERATURES)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "return_token_ids": True}
        out.append({"custom_id": f"{len(out):06d}", "method": "POST", "url": "/v1/completions", "body": body})
    return out


class Foreign:
    """Texts that training must not see, by their runs of words.

    >>> Foreign(["return the greatest common divisor of two"], 4).shares_with("the greatest common divisor")
    True
    """

    def __init__(self, texts: Iterable[str], shared_words: int = SHARED_WORDS) -> None:
        self._length = shared_words
        self._runs = {run for text in texts for run in self._runs_of(text)}

    def shares_with(self, text: str) -> bool:
        """Whether the text has a run of words in common with them."""
        return not self._runs.isdisjoint(self._runs_of(text))

    def _runs_of(self, text: str) -> Iterator[tuple[str, ...]]:
        words = re.findall(r"[a-z]+|\d+", text.lower())
        return zip(*(words[start:] for start in range(self._length)), strict=False)


def beginnings(
    documents: Iterable[dict[str, Any]], tokenizer: Tokenizer, foreign: "Foreign", num_tokens: int, longest: int
) -> Iterator[list[int]]:
    """Up to `longest` tokens of each document's beginning, in the order of a hash, `num_tokens` in all."""
    for document in sorted(documents, key=lambda document: _hash(document["name"])):
        text = document["text"][: 6 * longest]
        if not foreign.shares_with(text):
            ids = tokenizer.encode(text).ids[:longest]
            if len(ids) > num_tokens:
                return
            num_tokens -= len(ids)
            yield ids


def _makers(documents: Sequence[dict[str, Any]]) -> dict[str, Iterator[str]]:
    ordered = sorted(documents, key=lambda document: _hash(document["name"]))
    prose = [document["text"] for document in ordered if document["kind"] != "code"]
    code = [document["text"] for document in ordered if document["kind"] == "code"]
    return {
        "function": _written_on(code),
        "code": _about_code(code),
        "write on": _beginnings(prose),
        "topic": _about_topics(),
        "passage": _about_passages(prose),
        "problem": _problems(),
    }


def _about_topics() -> Iterator[str]:
    draw = random.Random(1)
    topics, instructions = _templates()["topics"], _templates()["instructions"]
    while True:
        instruction = draw.choice(instructions)
        yield CHAT.format(instruction.format(*draw.sample(topics, 2)))


def _problems() -> Iterator[str]:
    draw = random.Random(2)
    while True:
        a, b, c = draw.randint(3, 20), draw.randint(2, 12), draw.randint(2, 9)
        names = {"who": draw.choice(_templates()["names"]), "thing": draw.choice(_templates()["things"])}
        yield CHAT.format(
            draw.choice(_templates()["problems"]).format(a=a, b=b, c=c, d=a * draw.randint(10, 40), **names)
        )


def _about_passages(texts: Sequence[str]) -> Iterator[str]:
    draw = random.Random(3)
    for passage in _passages(texts, draw, 300, 1200):
        instruction = draw.choice(_templates()["on_passages"])
        parts = [instruction, passage] if draw.random() < 0.7 else [passage, instruction]
        yield CHAT.format("\n\n".join(parts))


def _beginnings(texts: Sequence[str]) -> Iterator[str]:
    draw = random.Random(4)
    for passage in _passages(texts, draw, 60, 700):
        yield passage.rsplit(" ", 1)[0]


def _passages(texts: Sequence[str], draw: random.Random, shortest: int, longest: int) -> Iterator[str]:
    """Runs of whole paragraphs, document after document and round after round."""
    rounds = [[each.strip() for each in text.split("\n\n") if len(each) >= 40] for text in texts]
    at = 0
    while any(at < len(paragraphs) for paragraphs in rounds):
        for paragraphs in rounds:
            passage = "\n\n".join(paragraphs[at : at + 4])[: draw.randint(shortest, longest)]
            if len(passage) >= shortest:
                yield passage
        at += 4


def _written_on(texts: Sequence[str]) -> Iterator[str]:
    draw = random.Random(5)
    for _, head, _, _ in _functions(texts):
        yield draw.choice(("", "", "import math\n\n\n", "from typing import List\n\n\n", "import re\n\n\n")) + head


def _about_code(texts: Sequence[str]) -> Iterator[str]:
    draw = random.Random(6)
    for name, head, source, purpose in _functions(texts):
        kind = draw.randrange(3)
        if kind == 0:
            yield CHAT.format(f"{draw.choice(_templates()['on_code'])}\n\n```python\n{source}\n```")
        elif kind == 1:
            yield CHAT.format(draw.choice(_templates()["for_code"]).format(purpose, name=name))
        else:
            yield CHAT.format(f"Complete the following Python function.\n\n```python\n{head}```")


def _functions(texts: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """(name, signature with docstring, whole source, first sentence) of functions that have a docstring."""
    for text in texts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a foreign source's escapes
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
        rows = text.split("\n")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
                continue
            purpose = ast.get_docstring(node)
            if not purpose or len(purpose) < 25 or node.body[0].end_lineno is None or node.end_lineno is None:
                continue
            head = textwrap.dedent("\n".join(rows[node.lineno - 1 : node.body[0].end_lineno])) + "\n"
            source = textwrap.dedent("\n".join(rows[node.lineno - 1 : node.end_lineno]))
            if not node.name.startswith("__"):
                yield node.name, head, source, " ".join(purpose.split("\n\n")[0].split())


@cache
def _templates() -> dict[str, list[str]]:
    file = resources.files("mtp_jax.train") / "distillation_prompts.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"prompts {name}".encode()).digest()[:8], "big")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: writes both files, and says how much is in them."""
    parser = argparse.ArgumentParser(description="What self-distillation starts from.")
    parser.add_argument("--documents", type=Path, required=True, help="documents.jsonl of mtp_jax.train.corpus")
    parser.add_argument("--model", required=True, help="whose tokenizer counts the tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--not-in", type=Path, action="append", default=[], help="text that nothing may share")
    parser.add_argument("--count", type=int, default=8000, help="prompts to write")
    parser.add_argument("--longest", type=int, default=192, help="most tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=320, help="most tokens to be written on")
    parser.add_argument("--text-tokens", type=int, default=6_000_000, help="tokens of documents as they are")
    parser.add_argument("--text-longest", type=int, default=1024, help="most tokens of one document")
    options = parser.parse_args(arguments)
    loaded = load_model(options.model)
    tokenizer = tokenizer_of(loaded)
    if tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer.")
    foreign = Foreign(file.read_text(encoding="utf-8") for file in options.not_in)
    with options.documents.open(encoding="utf-8") as file:
        documents = [document for line in file if (document := json.loads(line))["split"] == "train"]
    options.out.mkdir(parents=True, exist_ok=True)
    made = lines(documents, tokenizer, foreign, options.count, (options.longest, options.max_tokens))
    (options.out / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made), encoding="utf-8")
    texts = beginnings(documents, tokenizer, foreign, options.text_tokens, options.text_longest)
    separator = next(iter(loaded.family.eos_token_ids), 0)
    num_tokens = write_tokens(options.out / "texts.tokens.xz", texts, separator=separator)
    print(json.dumps({"prompts": len(made), "text_tokens": num_tokens, "out": str(options.out)}))


if __name__ == "__main__":
    main()
