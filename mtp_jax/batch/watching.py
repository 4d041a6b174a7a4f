"""Who looks on while a job runs: a bar on the terminal, an event log, a metrics endpoint. None changes any result."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from mtp_jax.batch.summary import Summary
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM


@dataclass(frozen=True)
class Gauges:
    """What the engine holds at this moment."""

    num_running: int = 0
    num_waiting: int = 0
    draft_len: int = 0  # of the last decode step
    num_pages_used: int = 0
    num_pages: int = 0

    @classmethod
    def of(cls, llm: LLM | None) -> "Gauges":
        """Read from the scheduler's books alone; zeros where there is no engine yet."""
        if llm is None:
            return cls()
        group = llm.engine.group
        free = sum(shard.pool.num_free for shard in group.shards)
        total = sum(shard.pool.num_pages for shard in group.shards)
        return cls(
            num_running=sum(len(shard.slots) for shard in group.shards),
            num_waiting=len(group.waiting),
            draft_len=group.last_draft_len,
            num_pages_used=total - free,
            num_pages=total,
        )


class Watcher:
    """Sees everything and does nothing: what others begin from."""

    def began(self, summary: Summary, job: Mapping[str, Any]) -> None:
        """The job is known, and what of it was finished before."""

    def engine_started(self, llm: LLM) -> None:
        """A new engine serves from here on."""

    def engine_failed(self, num_under_way: int) -> None:
        """A step failed; so many requests run again."""

    def finished(self, number: int, result: Mapping[str, Any]) -> None:
        """A line has its result."""

    def part_written(self, num_results: int) -> None:
        """Results are safe."""

    def ended(self, summary: Summary) -> None:
        """The share is at its end, or the process about to stop."""


class Bar(Watcher):
    """One bar on stderr, on a terminal: lines, tokens a second, acceptance, draft length and pages in use."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._summary = Summary()
        self._llm: LLM | None = None
        self._began_s = 0.0

    def began(self, summary: Summary, job: Mapping[str, Any]) -> None:
        """Remembers what to count."""
        self._summary, self._began_s = summary, time.perf_counter()

    def engine_started(self, llm: LLM) -> None:
        """Opens it, now that the engine's own bar, of its programs, is done; remembers whose books to read."""
        self._llm = llm
        if self._bar is None:
            self._bar = tqdm(desc="lines", unit="line", initial=self._summary.num_done, disable=None)

    def finished(self, number: int, result: Mapping[str, Any]) -> None:
        """One further."""
        if self._bar is not None and not self._bar.disable:
            seconds = time.perf_counter() - self._began_s
            self._bar.set_postfix_str(status_line(self._summary, Gauges.of(self._llm), seconds), refresh=False)
            self._bar.update()

    def ended(self, summary: Summary) -> None:
        """Closes it."""
        if self._bar is not None:
            self._bar.close()


def status_line(summary: Summary, gauges: Gauges, seconds: float) -> str:
    """What the bar says.

    >>> status_line(Summary(num_completion_tokens=90), Gauges(3, 2, 4, 10, 40), 2.0)
    '45 tok/s, 1.00 tokens a step, K 4, 10/40 pages'
    """
    speed = summary.num_completion_tokens / max(seconds, 1e-9)
    return (
        f"{speed:.0f} tok/s, {summary.mean_acceptance_length:.2f} tokens a step, K {gauges.draft_len}, "
        f"{gauges.num_pages_used}/{gauges.num_pages} pages"
    )


class EventLog(Watcher):
    """One JSON line for each thing that happens, flushed at once; and every `seconds_between` how far the run is."""

    def __init__(self, file: Path, facts: Mapping[str, Any], *, seconds_between: float = 10.0) -> None:
        """`facts` are in every line, such as which process this is. `ConfigError` where it cannot be written."""
        self._facts = facts
        self._seconds_between = seconds_between
        self._summary = Summary()
        self._llm: LLM | None = None
        self._last_s = 0.0
        try:
            self._file: IO[str] = file.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--event-log {file} cannot be written: {error.strerror}.") from error

    def began(self, summary: Summary, job: Mapping[str, Any]) -> None:
        """The first line says what the job is."""
        self._summary = summary
        self._say("began", job=job)

    def engine_started(self, llm: LLM) -> None:
        """With how many slots and pages."""
        self._llm = llm
        self._say("engine_started", num_pages=Gauges.of(llm).num_pages, max_num_seqs=llm.engine.config.max_num_seqs)

    def engine_failed(self, num_under_way: int) -> None:
        """How many requests run again."""
        self._say("engine_failed", num_under_way=num_under_way)

    def finished(self, number: int, result: Mapping[str, Any]) -> None:
        """Lines that went wrong, each; else progress from time to time."""
        if result["error"] is not None:
            self._say("line_failed", line=number, custom_id=result["custom_id"], **result["error"])
        if time.monotonic() - self._last_s >= self._seconds_between:
            self._last_s = time.monotonic()
            self._say("progress", **asdict(self._summary), **asdict(Gauges.of(self._llm)))

    def part_written(self, num_results: int) -> None:
        """How many results became safe."""
        self._say("part_written", num_results=num_results)

    def ended(self, summary: Summary) -> None:
        """The last line has the summary."""
        self._say("ended", **asdict(summary))
        self._file.close()

    def _say(self, event: str, **more: Any) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        clock_s = round(time.monotonic(), 3)  # for durations
        self._file.write(json.dumps({"time": now, "clock_s": clock_s, "event": event, **self._facts, **more}) + "\n")
        self._file.flush()
