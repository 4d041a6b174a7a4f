"""Runs a batch: lines in, requests through the engine as slots come free, results out in parts, merged at the end."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from etils import epath

from mtp_jax.batch import storage
from mtp_jax.batch.bodies import Render
from mtp_jax.batch.lines import Asked, Refused, read_line
from mtp_jax.batch.merging import merge, shard_file, write_shard
from mtp_jax.batch.results import answered, failed, refused
from mtp_jax.batch.source import input_files, read_lines
from mtp_jax.batch.store import LineSet, PartStore
from mtp_jax.batch.summary import Summary
from mtp_jax.batch.suspects import Suspects, suspects_of
from mtp_jax.batch.team import ALONE, Team
from mtp_jax.batch.watching import Watcher
from mtp_jax.core.errors import EngineFailed
from mtp_jax.llm import LLM

Result = Mapping[str, Any]
Numbered = tuple[int, Asked]


@dataclass
class _Run:
    """Results on their way into parts, and all that they need on the way."""

    store: PartStore
    team: Team
    model: str
    render: Render | None
    summary: Summary
    watchers: Sequence[Watcher]
    lines_per_part: int
    seconds_per_part: float
    wants_origins: bool
    suspects: Suspects
    num_lines: int = 0  # of the whole input, as far as it was read
    waiting: list[tuple[int, Result]] = field(default_factory=list)
    written_s: float = field(default_factory=time.perf_counter)
    began_s: float = field(default_factory=time.perf_counter)

    def take(self, number: int, result: Result) -> None:
        self.waiting.append((number, result))
        self.summary.count(result)
        for watcher in self.watchers:
            watcher.finished(number, result)
        is_late = time.perf_counter() - self.written_s > self.seconds_per_part
        if len(self.waiting) >= self.lines_per_part or is_late:
            self.flush()

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.written_s = time.perf_counter()
        self.store.write(waiting)
        if waiting:
            for watcher in self.watchers:
                watcher.part_written(len(waiting))

    def started(self, llm: LLM) -> LLM:
        self.summary.num_engine_starts += 1
        for watcher in self.watchers:
            watcher.engine_started(llm)
        return llm


def run_batch(
    make_llm: Callable[[], LLM],
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    *,
    model: str,
    job: Mapping[str, Any],
    render: Render | None = None,
    team: Team = ALONE,
    resume: bool = False,
    merged: bool = True,
    wants_origins: bool = False,
    watchers: Sequence[Watcher] = (),
    lines_per_part: int = 256,
    seconds_per_part: float = 10.0,
    look_ahead: int = 1024,
) -> Summary:
    """Writes `output`: one result line for each line of `inputs` (paths and globs), in their order.

    `make_llm` is called when there is something to run, and again after a step failed on the device: then the requests
    that were under way run one at a time, and those that fail alone get a result that says so. `model` is what lines
    may name, `render` makes prompts of conversations. `job`: what decides the results (model, drafting, options); a run
    is resumed only under the same, and the same inputs. With `resume`, a job that is finished already is left alone.

    `team`: this process among several. Each answers its share of the lines, and the one that ends last merges; with
    `merged` False each writes a file of its own (see `merging.shard_file`). Processes of one engine fail together
    (`EngineFailed`), also for the sake of one bad request; started again with `resume`, they find out which one it is
    (see `suspects`), and it gets its result too.

    `wants_origins` adds to results how each of their tokens came, and when their requests began and ended, in seconds
    since the run began.

    Longer requests go first among the next `look_ahead` lines, so that the end is not one slow request; seeds come from
    the lines, so this changes no result. `ConfigError` for input and output that cannot be used.
    """
    path = storage.path_of(output)
    results = _result_files(path, team, merged)
    files = input_files(inputs, results)
    stated = {
        **job,
        "model": model,
        "inputs": [[str(file), storage.size_bytes(file)] for file in files],
        "merged": merged,
        "token_origins": wants_origins,
    }
    if resume and _is_finished(path, results):
        return Summary(is_complete=True)
    store = PartStore(path, stated, resume=resume, share=team.share)
    began = time.perf_counter()
    summary = Summary()
    done = store.finished()
    suspects = suspects_of(store, done) if team.is_together else Suspects()
    team.wait()  # nobody writes while another reads: processes that share lines must find the same ones finished
    run = _Run(store, team, model, render, summary, watchers, lines_per_part, seconds_per_part, wants_origins, suspects)
    for watcher in watchers:
        watcher.began(summary, stated)
    try:
        try:
            requests = _longest_first(_asked(files, done, run), look_ahead)
            if team.is_together:
                _serve_together(make_llm, _apart(files, run), requests, run)
            else:
                _serve(make_llm, requests, run)
        finally:
            run.flush()
        team.part()
        summary.is_complete = team.share.is_writer and _finish(store, run.num_lines, merged)
    finally:
        summary.seconds = time.perf_counter() - began
        for watcher in watchers:
            watcher.ended(summary)
    return summary


def _result_files(output: epath.Path, team: Team, merged: bool) -> list[epath.Path]:
    """Where the results of the whole job go."""
    shares = [replace(team.share, index=index) for index in range(team.share.count)]
    return [output] if merged else [shard_file(output, share) for share in shares]


def _is_finished(output: epath.Path, results: Sequence[epath.Path]) -> bool:
    """Whether all results are in their place; what a kill left behind of the removal of parts goes now."""
    if not all(storage.exists(file) for file in results):
        return False
    storage.remove_folder(output.with_name(output.name + ".parts"))
    return True


def _finish(store: PartStore, num_lines: int, merged: bool) -> bool:
    """Ends this share; True if it was the last one, and so the whole job is at its end."""
    if not merged:
        write_shard(store, num_lines)
    if not store.end_share(num_lines):
        return False
    if merged:
        merge(store, num_lines)
    else:
        store.remove()
    return True


def _asked(files: Sequence[epath.Path], done: LineSet, run: _Run) -> Iterator[Numbered]:
    """The requests of this share without a result; lines that are none get theirs at once."""
    for line in read_lines(files):
        run.num_lines = line.number + 1
        if not run.team.share.takes(line.number):
            continue
        if line.number in done:
            run.summary.num_resumed += 1
            continue
        if line.number in run.suspects.apart:
            continue
        read = read_line(line.raw, model=run.model, render=run.render)
        if isinstance(read, Refused):
            run.take(line.number, refused(read))
        else:
            yield line.number, read


def _apart(files: Sequence[epath.Path], run: _Run) -> dict[int, Asked]:
    """This share's requests among the suspects."""
    if not run.suspects.apart:
        return {}
    own = (
        line for line in read_lines(files) if line.number in run.suspects.apart and run.team.share.takes(line.number)
    )
    read = {line.number: read_line(line.raw, model=run.model, render=run.render) for line in own}
    return {number: asked for number, asked in read.items() if isinstance(asked, Asked)}


def _longest_first(asked: Iterable[Numbered], look_ahead: int) -> Iterator[Numbered]:
    ahead: list[Numbered] = []
    for numbered in asked:
        ahead.append(numbered)
        if len(ahead) == look_ahead:
            yield from sorted(ahead, key=_longest)
            ahead = []
    yield from sorted(ahead, key=_longest)


def _longest(numbered: Numbered) -> tuple[float, int]:
    number, asked = numbered
    wanted = asked.params.max_tokens
    if wanted is None:
        return -math.inf, number
    return (-wanted if isinstance(wanted, int) else 0), number  # what is no number is refused by the engine


def _serve(make_llm: Callable[[], LLM], requests: Iterator[Numbered], run: _Run) -> None:
    first = next(requests, None)
    if first is None:
        return
    left = _chain(first, requests)
    while True:
        under_way: dict[int, Asked] = {}
        if _run_until_failure(run.started(make_llm()), left, under_way, run):
            return
        for watcher in run.watchers:
            watcher.engine_failed(len(under_way))
        for number, asked in sorted(under_way.items()):
            alone: dict[int, Asked] = {}
            if not _run_until_failure(run.started(make_llm()), iter([(number, asked)]), alone, run):
                run.take(number, failed(asked, "The request's step failed on the device, also when it ran alone."))


def _serve_together(
    make_llm: Callable[[], LLM], apart: Mapping[int, Asked], requests: Iterator[Numbered], run: _Run
) -> None:
    """The others' steps need this process, whether it has requests or not."""
    for number in run.suspects.given_up:
        if number in apart:
            run.take(number, failed(apart[number], "The request's step failed on the device whenever it ran alone."))
    run.flush()
    llm = run.started(make_llm())
    for number in run.suspects.alone:
        own = [(number, apart[number])] if number in apart else []
        _run_or_record(llm, iter(own), run, alone=number)
        run.flush()
    _run_or_record(llm, requests, run)


def _run_or_record(llm: LLM, requests: Iterator[Numbered], run: _Run, *, alone: int | None = None) -> None:
    """Runs requests as they come. `EngineFailed` when a step failed, after writing down what was under way.

    The engine can only be built again by all processes at once: by their next start.
    """
    under_way: dict[int, Asked] = {}
    try:
        _run_all(llm, requests, under_way, run)
    except EngineFailed:
        lines = under_way if alone is None else [alone]
        run.suspects.record(run.store, run.team.process, lines, alone=alone is not None)
        raise


def _chain(first: Numbered, rest: Iterator[Numbered]) -> Iterator[Numbered]:
    yield first
    yield from rest


def _run_until_failure(llm: LLM, requests: Iterator[Numbered], under_way: dict[int, Asked], run: _Run) -> bool:
    """Runs requests as they come; False when a step failed, with those it took along in `under_way`."""
    try:
        _run_all(llm, requests, under_way, run)
    except EngineFailed:
        return False
    return True


def _run_all(llm: LLM, requests: Iterator[Numbered], under_way: dict[int, Asked], run: _Run) -> None:
    """Runs requests as they come; those that have no result yet are in `under_way`."""

    def taken() -> Iterator[tuple[Any, Any]]:
        for number, asked in requests:
            under_way[number] = asked
            numbers[next(places)] = number
            began_s[number] = time.perf_counter() - run.began_s
            yield asked.prompt, asked.params

    numbers: dict[int, int] = {}  # of the places under way
    places = count()
    began_s: dict[int, float] = {}
    for place, output in llm.generate_each(taken(), wants_trace=run.wants_origins):
        number = numbers.pop(place)
        result = answered(under_way.pop(number), output, run.model, llm.tokenizer)
        began = began_s.pop(number)
        if run.wants_origins and result["error"] is None:
            ended = time.perf_counter() - run.began_s
            result["response"]["body"]["metrics"]["times_s"] = [round(began, 4), round(ended, 4)]
        run.take(number, result)
