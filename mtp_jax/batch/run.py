"""Runs a batch: lines in, requests through the engine as slots come free, results out in parts, merged at the end."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtp_jax.batch.bodies import Render
from mtp_jax.batch.lines import Asked, Refused, read_line
from mtp_jax.batch.results import answered, failed, refused
from mtp_jax.batch.source import input_files, read_lines
from mtp_jax.batch.store import PartStore
from mtp_jax.core.errors import EngineFailed
from mtp_jax.llm import LLM

Result = Mapping[str, Any]
Numbered = tuple[int, Asked]


@dataclass
class Summary:
    """What a run did. Counts are of lines; `num_resumed` had a result before it began."""

    num_answered: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    num_completion_tokens: int = 0
    num_decode_steps: int = 0
    num_accepted_tokens: int = 0
    seconds: float = 0.0

    @property
    def num_lines(self) -> int:
        """All of the input."""
        return self.num_answered + self.num_refused + self.num_failed + self.num_resumed

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a decode step of one request brought."""
        return 1 + self.num_accepted_tokens / self.num_decode_steps if self.num_decode_steps else 1.0

    def count(self, result: Result) -> None:
        """Adds one result line."""
        status = result["response"]["status_code"]
        if status == 200:
            body = result["response"]["body"]
            self.num_answered += 1
            self.num_completion_tokens += body["usage"]["completion_tokens"]
            self.num_decode_steps += body["metrics"]["num_steps"]
            self.num_accepted_tokens += body["metrics"]["num_accepted_tokens"]
        elif status == 400:
            self.num_refused += 1
        else:
            self.num_failed += 1


@dataclass
class _Run:
    """Results on their way into parts."""

    store: PartStore
    summary: Summary
    lines_per_part: int
    seconds_per_part: float
    bar: Any
    waiting: list[tuple[int, Result]] = field(default_factory=list)
    written_s: float = field(default_factory=time.perf_counter)

    def take(self, number: int, result: Result) -> None:
        self.waiting.append((number, result))
        self.summary.count(result)
        self.bar.update()
        self.bar.set_postfix_str(f"{self.summary.mean_acceptance_length:.2f} tokens a step", refresh=False)
        is_late = time.perf_counter() - self.written_s > self.seconds_per_part
        if len(self.waiting) >= self.lines_per_part or is_late:
            self.flush()

    def flush(self) -> None:
        self.store.write(self.waiting)
        self.waiting = []
        self.written_s = time.perf_counter()


def run_batch(
    make_llm: Callable[[], LLM],
    inputs: Sequence[str],
    output: Path,
    *,
    model: str,
    job: Mapping[str, Any],
    render: Render | None = None,
    resume: bool = False,
    lines_per_part: int = 256,
    seconds_per_part: float = 10.0,
    look_ahead: int = 1024,
) -> Summary:
    """Writes `output`: one result line for each line of `inputs` (paths and globs), in their order.

    `make_llm` is called when there is something to run, and again after a step failed on the device: then the requests
    that were under way run one at a time, and those that fail alone get a result that says so. `model` is what lines
    may name, `render` makes prompts of conversations. `job`: what decides the results (model, drafting, options); a run
    is resumed only under the same, and the same inputs. Longer requests go first among the next `look_ahead` lines, so
    that the end is not one slow request; seeds come from the lines, so this changes no result. `ConfigError` for input
    and output that cannot be used.
    """
    files = input_files(inputs)
    stated = {**job, "model": model, "inputs": [[str(file), file.stat().st_size] for file in files]}
    store = PartStore(output, stated, resume=resume)
    began = time.perf_counter()
    done = store.finished()
    summary = Summary(num_resumed=len(done))
    with tqdm(desc="lines", unit="line", disable=None, initial=len(done)) as bar:
        run = _Run(store, summary, lines_per_part, seconds_per_part, bar)
        try:
            _serve(make_llm, _longest_first(_asked(files, done, run, model, render), look_ahead), run, model)
        finally:
            run.flush()
    store.merge()
    summary.seconds = time.perf_counter() - began
    return summary


def _asked(files: Sequence[Path], done: set[int], run: _Run, model: str, render: Render | None) -> Iterator[Numbered]:
    """The requests without a result; lines that are none get theirs at once."""
    for line in read_lines(files):
        if line.number in done:
            continue
        read = read_line(line.raw, model=model, render=render)
        if isinstance(read, Refused):
            run.take(line.number, refused(read))
        else:
            yield line.number, read


def _longest_first(asked: Iterable[Numbered], look_ahead: int) -> Iterator[Numbered]:
    ahead: list[Numbered] = []
    for numbered in asked:
        ahead.append(numbered)
        if len(ahead) == look_ahead:
            yield from sorted(ahead, key=_longest)
            ahead = []
    yield from sorted(ahead, key=_longest)


def _longest(numbered: Numbered) -> tuple[int, int]:
    number, asked = numbered
    wanted = asked.params.max_tokens
    return (-wanted if isinstance(wanted, int) else 0), number  # what is no number is refused by the engine


def _serve(make_llm: Callable[[], LLM], requests: Iterator[Numbered], run: _Run, model: str) -> None:
    first = next(requests, None)
    if first is None:
        return
    left = _chain(first, requests)
    while True:
        under_way: dict[int, Asked] = {}
        if _run_until_failure(make_llm(), left, under_way, run, model):
            return
        for number, asked in sorted(under_way.items()):
            alone: dict[int, Asked] = {}
            if not _run_until_failure(make_llm(), iter([(number, asked)]), alone, run, model):
                run.take(number, failed(asked, "The request's step failed on the device, also when it ran alone."))


def _chain(first: Numbered, rest: Iterator[Numbered]) -> Iterator[Numbered]:
    yield first
    yield from rest


def _run_until_failure(
    llm: LLM, requests: Iterator[Numbered], under_way: dict[int, Asked], run: _Run, model: str
) -> bool:
    """Runs requests as they come; False when a step failed, with those it took along in `under_way`."""

    def taken() -> Iterator[tuple[Any, Any]]:
        for number, asked in requests:
            under_way[number] = asked
            numbers.append(number)
            yield asked.prompt, asked.params

    numbers: list[int] = []
    try:
        for place, output in llm.generate_each(taken()):
            number = numbers[place]
            run.take(number, answered(under_way.pop(number), output, model))
    except EngineFailed:
        return False
    return True
