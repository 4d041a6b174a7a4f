"""What is seen of a running job: the event log and the metrics, against what the engine did."""

import contextlib
import fcntl
import functools
import json
import os
import pty
import re
import struct
import termios
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from mtp_jax.batch.prometheus import Endpoint, summed
from mtp_jax.batch.watching import Bar, EventLog, Watcher
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.scheduler import Totals
from tests.batch.toy_job import good_line, run_toy_batch, toy_llm


class Scraping(Watcher):
    """Reads the endpoint while the job runs."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.seen: list[str] = []

    def part_written(self, num_results: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.endpoint.port}/metrics") as response:
            self.seen.append(response.read().decode())


def test_metrics_have_vllms_names_and_the_engines_numbers(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join([*(good_line(number) for number in range(11)), b"nonsense\n"]))
    endpoint = Endpoint(0, "toy")
    scraping, log = Scraping(endpoint), EventLog(tmp_path / "events.jsonl", {"process": 0}, seconds_between=0)
    summary = run_toy_batch(source, tmp_path / "out.jsonl", watchers=[scraping, endpoint, log])
    values = dict(line.rsplit(" ", 1) for line in scraping.seen[-1].splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="toy"'

    def value(name: str, more: str = "") -> float:
        (found,) = [float(values[key]) for key in values if key.startswith(f"{name}{{") and more in key]
        return found

    assert labels.split(",")[0] in next(iter(values))
    assert value("vllm:generation_tokens_total") == summary.num_completion_tokens
    assert value("vllm:prompt_tokens_total") == summary.num_prompt_tokens
    assert value("vllm:spec_decode_num_accepted_tokens_total") == summary.num_accepted_tokens
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"') > 0
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:request_success_total", 'finished_reason="error"') == 1
    finished = sum(float(values[key]) for key in values if key.startswith("vllm:request_success_total{"))
    assert finished == 12
    first = dict(line.rsplit(" ", 1) for line in scraping.seen[0].splitlines() if not line.startswith("#"))
    assert any(key.startswith("vllm:num_requests_running{") and float(first[key]) > 0 for key in first)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics")

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events][:2] == ["began", "line_failed"]
    assert events[-1]["event"] == "ended"
    assert events[-1]["num_answered"] == 11
    assert sum(event.get("num_results", 0) for event in events) == 12
    assert {event["process"] for event in events} == {0}
    assert any(event["event"] == "progress" and event["num_pages"] > 0 for event in events)


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Standard error as a terminal of 120 columns; what was written to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # what reading raises once the other end is closed
            while data := os.read(master, 4096):
                written.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(slave, "w") as stderr:
            monkeypatch.setattr("sys.stderr", stderr)
            yield written
    finally:
        reader.join()
        os.close(master)


def test_a_terminal_shows_one_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(good_line(number) for number in range(11)))
    monkeypatch.setattr("mtp_jax.batch.watching.tqdm", functools.partial(tqdm, mininterval=0))  # every frame
    toy_llm()  # its programs have a bar of their own
    with terminal(monkeypatch) as written:
        summary = run_toy_batch(source, tmp_path / "out.jsonl", watchers=[Bar()])
    shown = b"".join(written).decode().replace("\r\n", "\n")
    frames = [frame.strip() for frame in shown.split("\r") if frame.strip()]
    assert shown.count("\n") == 1  # one line, drawn over and over
    assert all(len(frame) <= 120 for frame in frames)
    assert re.match(r"lines: 11line \[\d\d:\d\d, .* \d+ tok/s, ", frames[-1])
    assert f", {summary.mean_acceptance_length:.2f} tokens a step, " in frames[-1]
    assert any(re.search(r", K 2, [1-9]\d?/30 pages\]$", frame) for frame in frames)


def test_what_is_no_terminal_shows_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_bytes(good_line(0))
    run_toy_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", watchers=[Bar()])
    assert capsys.readouterr().err == ""


def test_counters_of_several_engines_add_up() -> None:
    first, second = Totals(num_drafts=1, num_accepted_tokens_per_pos=[3, 1]), Totals(num_drafts=2)
    second.num_accepted_tokens_per_pos = [1]
    together = summed([first, second])
    assert (together.num_drafts, together.num_accepted_tokens_per_pos) == (3, [4, 1])
    assert first.num_accepted_tokens_per_pos == [3, 1]


def test_what_cannot_be_watched_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--event-log .* cannot be written"):
        EventLog(tmp_path / "no" / "x", {})
    with pytest.raises(ConfigError, match="--metrics-port 99999999 cannot be served"):
        Endpoint(99999999, "toy")

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return original(name, *rest, **named)

    import builtins

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"needs prometheus_client: pip install 'mtp-jax\[metrics\]'"):
        Endpoint(0, "toy")
