"""A whole batch: one result for each line, equal to the engine's own answer, through kills, failures and odd lines."""

import json
import random
import resource
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
from tests.batch.kills import kill_and_go_on
from tests.batch.object_store import object_store
from tests.batch.toy_job import good_line, restarted_llm, run_toy_batch, team_of, toy_llm
from tests.batch.toy_processes import ToyProcesses
from tests.laws.support import request as toy_request


def results_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def expected(raw: bytes, family: ToyFamily | None = None) -> tuple[int, ...]:
    """Plain decoding's tokens for a line."""
    asked = read_line(raw, model="toy")
    assert isinstance(asked, Asked)
    params = asked.params
    one = toy_request(
        "a", asked.prompt, seed=params.seed or 0, temperature=params.temperature, max_tokens=params.max_tokens
    )
    return plain_decode((family or ToyFamily()).plain_logits, one, max_model_len=40).tokens


def answer(result: dict[str, Any]) -> tuple[int, ...]:
    return tuple(result["response"]["body"]["choices"][0]["token_ids"])


class Stop(Exception):
    pass


class Stopping:
    """An engine that is interrupted after some answers."""

    def __init__(self, llm: LLM, num_answers: int) -> None:
        self.llm, self.num_answers = llm, num_answers
        self.engine, self.tokenizer = llm.engine, llm.tokenizer

    def generate_each(self, requests: Any, *, wants_trace: bool) -> Iterator[Any]:
        for count, pair in enumerate(self.llm.generate_each(requests, wants_trace=wants_trace)):
            if count == self.num_answers:
                raise Stop
            yield pair


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

    summary = run_toy_batch(source, output, make_llm=lambda: poisoned_llm(monkeypatch))
    assert (summary.num_answered, summary.num_failed) == (19, 1)
    assert_all_but_one_answered(lines, results_of(output), poison, "also when it ran alone")


def poisoned_llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A new engine whose steps fail while a certain prompt is in a slot."""
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


def assert_all_but_one_answered(lines: list[bytes], results: list[dict[str, Any]], failed: int, told: str) -> None:
    for number, (raw, result) in enumerate(zip(lines, results, strict=True)):
        if number == failed:
            assert result["response"]["status_code"] == 500
            assert told in result["error"]["message"]
        else:
            assert answer(result) == expected(raw.rstrip(b"\n"))


def test_a_glob_does_not_mean_the_jobs_own_results(tmp_path: Path) -> None:
    """The first share's file is there when the second one starts, in the folder of the input."""
    lines = [good_line(number) for number in range(6)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    everything, output = tmp_path / "*.jsonl", tmp_path / "out.jsonl"
    for process in (0, 1):
        run_toy_batch(everything, output, team=team_of(process, 2), merged=False, resume=True)
    shards = [results_of(tmp_path / f"out-0000{index}-of-00002.jsonl") for index in (0, 1)]
    assert [answer(one) for one in shards[0]] == [expected(raw.rstrip(b"\n")) for raw in lines[::2]]
    assert [answer(one) for one in shards[1]] == [expected(raw.rstrip(b"\n")) for raw in lines[1::2]]


def test_a_message_does_not_repeat_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(good_line(0, min_p="x" * 100_000) + b'{"custom_id": "a\tb"}\n')
    run_toy_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    long, control = (result["error"]["message"] for result in results_of(tmp_path / "out.jsonl"))
    assert long.startswith("min_p is 'xxx")
    assert len(long) == 500
    assert control == "The line is not JSON: Invalid control character at column 17."


def test_the_shares_of_a_job_make_one_result(tmp_path: Path) -> None:
    """The second share is stopped, then all goes on with three shares in place of two."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(30)]
    lines[5] = lines[6] = b"nonsense\n"
    source.write_bytes(b"".join(lines))
    first = run_toy_batch(source, output, team=team_of(0, 2))
    assert (first.num_lines, first.num_refused, first.is_complete) == (15, 1, False)
    with pytest.raises(Stop):
        run_toy_batch(source, output, make_llm=lambda: Stopping(restarted_llm(), 4), team=team_of(1, 2))
    with pytest.raises(ConfigError, match="go on with --resume"):
        run_toy_batch(source, output, team=team_of(0, 3))
    again = [run_toy_batch(source, output, team=team_of(share, 3), resume=True) for share in (2, 0, 1)]
    assert [one.is_complete for one in again] == [False, False, True]
    assert sum(one.num_resumed for one in again) == 15 + 4 + 1
    assert sum(one.num_done for one in again) == 10
    results = results_of(output)
    for number, (raw, result) in enumerate(zip(lines, results, strict=True)):
        assert (result["error"] is None) == (number not in (5, 6))
        if result["error"] is None:
            assert answer(result) == expected(raw.rstrip(b"\n"))
    late = run_toy_batch(source, output, team=team_of(1, 3), resume=True)
    assert (late.num_lines, late.is_complete) == (0, True)
    assert [*tmp_path.glob("out*")] == [output]


def test_results_may_be_left_in_a_file_for_each_share(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(9)]
    source.write_bytes(b"".join(lines))
    for share in range(2):
        run_toy_batch(source, output, team=team_of(share, 2), merged=False)
    names = ["out-00000-of-00002.jsonl", "out-00001-of-00002.jsonl"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == names
    for share, name in enumerate(names):
        answers = [answer(result) for result in results_of(tmp_path / name)]
        assert answers == [expected(raw.rstrip(b"\n")) for raw in lines[share::2]]
    assert run_toy_batch(source, output, team=team_of(1, 2), merged=False, resume=True).num_lines == 0


def test_a_job_whose_files_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store(monkeypatch) as store:
        lines = [good_line(number) for number in range(9)]
        store.objects["bucket/in-1.jsonl"] = b"".join(lines[:5])
        store.objects["bucket/in-2.jsonl"] = b"".join(lines[5:])
        for share in range(2):
            assert not any("out.jsonl" in name for name in store.objects if ".parts/" not in name)
            run_toy_batch("gs://bucket/in-*.jsonl", "gs://bucket/out.jsonl", team=team_of(share, 2))
        assert sorted(store.objects) == ["bucket/in-1.jsonl", "bucket/in-2.jsonl", "bucket/out.jsonl"]
        results = [json.loads(line) for line in store.objects["bucket/out.jsonl"].splitlines()]
    assert [answer(result) for result in results] == [expected(raw.rstrip(b"\n")) for raw in lines]


def test_killed_processes_leave_what_can_be_gone_on_with(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(80)]
    source.write_bytes(b"".join(lines))
    with ToyProcesses(source, output, 2) as job:
        job.start_all()
        job.wait_for_parts(2)
        job.kill([0, 1])
    for share in range(2):
        run_toy_batch(source, output, resume=True, team=team_of(share, 2))
    assert [answer(result) for result in results_of(output)] == [expected(raw.rstrip(b"\n")) for raw in lines]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.long
@pytest.mark.parametrize(("num_processes", "num_devices", "num_lines"), [(1, 1, 1500), (4, 2, 2000)])
def test_thirty_random_kills(tmp_path: Path, num_processes: int, num_devices: int, num_lines: int) -> None:
    """Of all processes, or of one of them whose neighbours then end; while starting, at work, or merging."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(num_lines)]
    source.write_bytes(b"".join(lines))
    dice = random.Random(num_processes)
    kills = 0
    with ToyProcesses(source, output, num_processes, num_devices=num_devices) as job:
        while kills < 30:
            moment = dice.choice(["starting", "at work", "at work", "merging"])
            job.start_all()
            if moment == "at work":
                job.wait_for_parts(dice.randrange(1, 9))
            elif moment == "merging" and kills > 20:
                job.wait_for_end_of(num_processes - 1)
            time.sleep(dice.uniform(0, 0.5))
            is_single = num_processes > 1 and dice.random() < 0.4
            job.kill([dice.randrange(num_processes)] if is_single else range(num_processes))
            kills += 1
            if is_single:
                time.sleep(dice.uniform(0, 2))
                job.kill(range(num_processes))
                kills += 1
            if output.exists():
                print(f"finished after {kills} kills")
                break
        job.start_all()
        job.wait()
    print(f"{kills} kills")
    assert [answer(result) for result in results_of(output)] == [expected(raw.rstrip(b"\n")) for raw in lines]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.long
def test_thirty_random_kills_of_the_bundled_models_job(tmp_path: Path) -> None:
    """Four processes of two devices each, 2,000 requests, by the command line."""
    assert kill_and_go_on(tmp_path, num_requests=2000, num_kills=30).total() >= 30


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
        opened.write(b"x" * (40 << 20) + b"\n")
    toy_llm()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary = run_toy_batch(source, output)
    growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    print(f"memory grew by {growth_mib:.0f} MiB")
    assert growth_mib < 64
    results = results_of(output)
    assert len(results) == summary.num_lines == 10_001
    for number, result in enumerate(results):
        if number in good:
            assert answer(result) == expected(good[number].rstrip(b"\n"))
        else:
            assert result["response"]["status_code"] == 400
