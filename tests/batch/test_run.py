"""A whole batch: one result for each line, equal to the engine's own answer, through kills, failures and odd lines."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from mtp_jax.batch.lines import Asked, read_line
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM
from mtp_jax.testing.oracle import plain_decode
from mtp_jax.testing.toy_family import ToyFamily
from tests.architecture.repository import ROOT
from tests.batch.toy_job import good_line, restarted_llm, run_toy_batch
from tests.laws.support import request as toy_request


def results_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def expected(raw: bytes) -> tuple[int, ...]:
    """Plain decoding's tokens for a line."""
    asked = read_line(raw, model="toy")
    assert isinstance(asked, Asked)
    params = asked.params
    one = toy_request(
        "a", asked.prompt, seed=params.seed or 0, temperature=params.temperature, max_tokens=params.max_tokens
    )
    return plain_decode(ToyFamily().plain_logits, one, max_model_len=40).tokens


def answer(result: dict[str, Any]) -> tuple[int, ...]:
    return tuple(result["response"]["body"]["choices"][0]["token_ids"])


def test_every_line_has_one_result_in_its_place(tmp_path: Path) -> None:
    lines = [good_line(number) for number in range(40)]
    lines[7] = b"not JSON\n"
    lines[8] = lines[9] = good_line(8)  # the same id, the same line
    lines[20] = good_line(20, max_tokens=-1)
    lines[21] = good_line(21, prompt=[1] * 50)
    lines[22] = b"\n"
    lines[24] = good_line(24, n=2)  # it draws its tokens
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(lines).rstrip(b"\n"))
    summary = run_toy_batch(source, output)
    results = results_of(output)
    assert len(results) == len(lines)
    bad = {7: "not JSON", 20: "max_tokens is -1", 21: "at most 39", 22: "not JSON"}
    for number, (raw, result) in enumerate(zip(lines, results, strict=True)):
        if number in bad:
            assert result["response"]["status_code"] == 400
            assert bad[number] in result["error"]["message"]
        else:
            assert result["error"] is None
            assert answer(result) == expected(raw.rstrip(b"\n"))
            assert result["custom_id"] == json.loads(raw)["custom_id"]
            body = result["response"]["body"]
            assert len(body["choices"]) == (2 if number == 24 else 1)
            assert body["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])
    assert (summary.num_lines, summary.num_answered, summary.num_refused) == (40, 36, 4)
    assert summary.mean_acceptance_length > 1
    assert [*tmp_path.glob("out*")] == [output]


def test_a_run_that_was_stopped_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(24)]
    source.write_bytes(b"".join(lines))

    class Stop(Exception):
        pass

    class Stopping:
        """An engine that is interrupted after some answers."""

        def __init__(self, llm: LLM, num_answers: int) -> None:
            self.llm, self.num_answers = llm, num_answers

        def generate_each(self, requests: Any) -> Iterator[Any]:
            for count, pair in enumerate(self.llm.generate_each(requests)):
                if count == self.num_answers:
                    raise Stop
                yield pair

    with pytest.raises(Stop):
        run_toy_batch(source, output, make_llm=lambda: Stopping(restarted_llm(), 9))
    assert not output.exists()
    with pytest.raises(ConfigError, match="go on with --resume"):
        run_toy_batch(source, output)
    summary = run_toy_batch(source, output, resume=True)
    assert summary.num_resumed == 9
    assert summary.num_answered == 15
    assert [answer(result) for result in results_of(output)] == [expected(raw.rstrip(b"\n")) for raw in lines]


def test_a_request_that_breaks_the_device_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it is prefilled, the step fails; its neighbours of that moment are run again and answered."""
    poison = 10
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(20)]
    lines[poison] = good_line(poison, prompt=[28] * 11, max_tokens=19)
    source.write_bytes(b"".join(lines))

    def make_llm() -> LLM:
        llm = restarted_llm()
        launcher = llm.engine.launcher
        launch = type(launcher).launch

        def failing(decision: Any, inputs: Any) -> Any:
            seated = [slot.state.request.prompt for slot in llm.engine.scheduler.slots]
            if (28,) * 11 in seated:
                raise jax.errors.JaxRuntimeError("INTERNAL: poisoned")
            return launch(launcher, decision, inputs)

        monkeypatch.setattr(launcher, "launch", failing)
        return llm

    summary = run_toy_batch(source, output, make_llm=make_llm)
    assert (summary.num_answered, summary.num_failed) == (19, 1)
    for number, (raw, result) in enumerate(zip(lines, results_of(output), strict=True)):
        if number == poison:
            assert result["response"]["status_code"] == 500
            assert "also when it ran alone" in result["error"]["message"]
        else:
            assert answer(result) == expected(raw.rstrip(b"\n"))


@pytest.mark.parametrize("num_kills", [1, pytest.param(30, marks=pytest.mark.long)])
def test_killed_at_random_moments_every_line_has_its_one_result(tmp_path: Path, num_kills: int) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(60 * num_kills)]
    source.write_bytes(b"".join(lines))
    dice = random.Random(num_kills)
    command = [sys.executable, "-m", "tests.batch.toy_job", str(source), str(output)]
    parts = tmp_path / "out.jsonl.parts"
    for kill in range(num_kills):
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as child:
            seen = len([*parts.glob("part-*.jsonl")])
            while child.poll() is None and len([*parts.glob("part-*.jsonl")]) < seen + 2:
                time.sleep(0.02)  # until it is at work
            assert child.returncode is None or output.exists(), kill
            time.sleep(dice.uniform(0, 0.3))
            child.kill()
        if output.exists():
            break
    if not output.exists():
        run_toy_batch(source, output, resume=True)
    assert [answer(result) for result in results_of(output)] == [expected(raw.rstrip(b"\n")) for raw in lines]
    assert not parts.exists()


@pytest.mark.long
def test_ten_thousand_odd_lines_among_good_ones(tmp_path: Path) -> None:
    dice = random.Random(0)
    odd = [
        lambda: bytes(dice.randrange(256) for _ in range(dice.randrange(30))).replace(b"\n", b" "),
        lambda: b"",
        lambda: b"[" * 50_000,
        lambda: b'{"custom_id": "' + b"x" * 20_000 + b'"}',
        lambda: good_line(dice.randrange(999), prompt=dice.choice([7, None, {}, [], [[1]], [-1], [1.5]]))[:-1],
        lambda: good_line(dice.randrange(999), **{dice.choice(["temperature", "stop", "n", "seed"]): [{}]})[:-1],
        lambda: good_line(dice.randrange(999), unknown=1)[:-1],
        lambda: good_line(1)[:-1].replace(b"/v1/completions", b"/v1/other"),
        lambda: good_line(1)[: dice.randrange(40)],
    ]
    good = {number: good_line(number) for number in dice.sample(range(10_000), 200)}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("wb") as opened:
        for number in range(10_000):
            opened.write(good.get(number) or dice.choice(odd)() + b"\n")
    summary = run_toy_batch(source, output)
    results = results_of(output)
    assert len(results) == summary.num_lines == 10_000
    for number, result in enumerate(results):
        if number in good:
            assert answer(result) == expected(good[number].rstrip(b"\n"))
        else:
            assert result["response"]["status_code"] == 400
