"""A model's own texts for its heads to learn from: answers to prompts, and questions that it asks itself.

    python -m mtp_jax.train.rollouts --model MODEL --prompts distil/prompts.jsonl --questions 20000 --out distil \
        --judged judged/humaneval.jsonl --not-in evaluation.txt

`OUT` receives `rows.npz`, and for each `--judged` file `judged-<its name>.npz`: greedy answers that `mtp-jax train
--held-out` goes through. `--prompts` are lines of `mtp_jax.train.prompts`, or any for `run-batch` with text prompts; of
their options the temperature counts. A chat model that is given the beginning of a user's turn writes what users write
to it; so asked, `--questions` times, it is then given its own questions to answer. Questions and answers that share a
run of words with a `--not-in` or `--judged` file are left out, like prompts there. The same arguments on the same kind
of device give the same files.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mtp_jax.checkpoints import load_model
from mtp_jax.core.errors import ConfigError
from mtp_jax.text import encode, tokenizer_of
from mtp_jax.train.prompts import CHAT, TEMPERATURES, Foreign
from mtp_jax.train.rows import write_rows
from mtp_jax.train.sampler import Sampler, SamplerConfig

_TURN, _REPLY = CHAT.split("{}")
SHORTEST_QUESTION = 4
"""Tokens; less is no question."""


def prompts_in(file: Path) -> Iterator[tuple[str, float]]:
    """Prompt and temperature of each request line."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            body = json.loads(line)["body"]
            prompt, temperature = body["prompt"], float(body.get("temperature", 1.0))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise ConfigError(f"{file}, line {number}, is no request with a prompt of text.") from None
        if not isinstance(prompt, str):
            raise ConfigError(f"{file}, line {number}, has a prompt that is no text.")
        yield prompt, temperature


def questions(sampler: Sampler, tokenizer: Tokenizer, foreign: Foreign, count: int, max_tokens: int) -> list[list[int]]:
    """Prompts that ask what the model itself asked when it was given the beginning of a user's turn, `count` times.

    Fewer than `count`: those that have no end after `max_tokens`, are too short, came before, or are foreign's.
    """
    turn, reply = encode(tokenizer, _TURN), encode(tokenizer, _REPLY)
    asked = sampler.write([turn] * count, [1.0] * count, max_tokens=max_tokens)
    found: dict[tuple[int, ...], list[int]] = {}
    for answer in asked.answers():
        ids = answer[:-1].tolist()
        is_ended = len(answer) < max_tokens and len(ids) >= SHORTEST_QUESTION
        prompt = [*turn, *ids, *reply]
        if is_ended and len(prompt) <= sampler.config.prompt_tokens and not foreign.shares_with(tokenizer.decode(ids)):
            found.setdefault(tuple(ids), prompt)
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: writes the rows, and says how many and how fast."""
    parser = argparse.ArgumentParser(description="A model's own texts, one a row.")
    parser.add_argument("--model", required=True, help="bundled name, model folder or GGUF file")
    parser.add_argument("--dtype", default=None, help="of weights and KV (default: the checkpoint's)")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="request lines for run-batch")
    parser.add_argument("--questions", type=int, default=0, help="questions that the model asks itself")
    parser.add_argument("--question-tokens", type=int, default=96, help="most tokens of such a question")
    parser.add_argument("--judged", type=Path, action="append", default=[], help="request lines to judge heads by")
    parser.add_argument(
        "--not-in", type=Path, action="append", default=[], help="text that no question or answer may share"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--batch-size", type=int, default=1024, help="texts at once")
    parser.add_argument("--prompt-tokens", type=int, default=160, help="longer prompts are left out")
    parser.add_argument("--max-tokens", type=int, default=224, help="most tokens of an answer")
    parser.add_argument("--limit", type=int, default=None, help="prompts of the files to answer (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of temperatures")
    options = parser.parse_args(arguments)
    loaded = load_model(options.model, dtype=options.dtype)
    tokenizer = tokenizer_of(loaded)
    if tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer.")
    config = SamplerConfig(
        batch_size=options.batch_size,
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    sampler = Sampler(loaded.family, loaded.weights, config)
    options.out.mkdir(parents=True, exist_ok=True)
    foreign_texts = [file.read_text(encoding="utf-8") for file in options.not_in]

    def fitting(file: Path) -> list[tuple[list[int], float]]:
        pairs = ((encode(tokenizer, prompt), temperature) for prompt, temperature in prompts_in(file))
        return [(ids, temperature) for ids, temperature in pairs if 1 <= len(ids) <= options.prompt_tokens]

    for file in options.judged:
        foreign_texts += [prompt for prompt, _ in prompts_in(file)]
        prompts = [ids for ids, _ in fitting(file)]
        _write(options.out / f"judged-{file.stem}.npz", sampler, prompts, [0.0] * len(prompts), lambda row: True)
    pairs = [pair for file in options.prompts for pair in fitting(file)][: options.limit]
    foreign = Foreign(foreign_texts)
    if options.questions:
        asked = questions(sampler, tokenizer, foreign, options.questions, options.question_tokens)
        pairs += [(ids, TEMPERATURES[index % len(TEMPERATURES)]) for index, ids in enumerate(asked)]
    prompts, temperatures = [ids for ids, _ in pairs], [temperature for _, temperature in pairs]

    def is_own(answer: np.ndarray) -> bool:
        return not foreign.shares_with(tokenizer.decode(answer.tolist()))

    _write(options.out / "rows.npz", sampler, prompts, temperatures, is_own)


def _write(
    file: Path,
    sampler: Sampler,
    prompts: list[list[int]],
    temperatures: list[float],
    is_wanted: Callable[[np.ndarray], bool],
) -> None:
    if not prompts:
        raise ConfigError(f"{file} would be empty: no prompt of at most {sampler.config.prompt_tokens} tokens.")
    began = time.perf_counter()
    written = sampler.write(prompts, temperatures)
    seconds = time.perf_counter() - began
    rows = written.at([index for index, answer in enumerate(written.answers()) if is_wanted(answer)])
    write_rows(file, rows)
    facts = {"rows": len(rows), "left_out": len(written) - len(rows), "answer_tokens": rows.num_answer_tokens}
    speed = {"seconds": round(seconds, 1), "tokens_per_second": round(written.num_answer_tokens / seconds)}
    print(json.dumps({"out": str(file), **facts, **speed}))


if __name__ == "__main__":
    main()
