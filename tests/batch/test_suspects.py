"""An engine over several processes, ended again and again by one request: it is found, and gets its result.

Here with one process, which is told that it is not alone; `tests/multiprocess/test_batch.py` has two.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.batch import storage
from mtp_jax.batch.shares import Share
from mtp_jax.batch.store import PartStore
from mtp_jax.batch.suspects import Suspects, suspects_of
from mtp_jax.batch.team import Team
from mtp_jax.core.errors import EngineFailed
from tests.batch.test_run import (
    Stop,
    Stopping,
    answer,
    assert_all_but_one_answered,
    expected,
    poisoned_llm,
    results_of,
)
from tests.batch.toy_job import good_line, restarted_llm, run_toy_batch

TOGETHER = Team(Share(), is_together=True)


def test_an_engine_of_several_processes_finds_the_request_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be built again by one of them: they end, and each start after that knows more."""
    poison = 10
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(20)]
    lines[poison] = good_line(poison, prompt=[28] * 11, max_tokens=19)
    source.write_bytes(b"".join(lines))
    run_again: dict[str, Any] = {"make_llm": lambda: poisoned_llm(monkeypatch), "team": TOGETHER, "resume": True}
    known: list[Suspects] = []
    for _ in range(4):
        with pytest.raises(EngineFailed):
            run_toy_batch(source, output, **run_again)
        known.append(suspects_of(store_of(output), store_of(output).finished()))
    assert [poison in suspects.alone for suspects in known] == [False, True, True, False]
    assert [suspects.given_up for suspects in known] == [(), (), (), (poison,)]
    summary = run_toy_batch(source, output, **run_again)
    assert (summary.num_failed, summary.is_complete) == (1, True)
    assert_all_but_one_answered(lines, results_of(output), poison, "whenever it ran alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def store_of(output: Path) -> PartStore:
    """The parts as the next start finds them."""
    job = json.loads((output.with_name(output.name + ".parts") / "job.json").read_text())
    return PartStore(storage.path_of(output), job, resume=True)


def test_two_deaths_of_other_causes_cost_nobody_their_answer(tmp_path: Path) -> None:
    """What was under way twice runs by itself, and is answered as ever."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [good_line(number) for number in range(12)]
    source.write_bytes(b"".join(lines))
    with pytest.raises(Stop):
        run_toy_batch(source, output, team=TOGETHER, make_llm=lambda: Stopping(restarted_llm(), 3))
    store = store_of(output)
    for death in (1, 2):
        Suspects(death).record(store, 0, [1, 5, 7], alone=False)
        Suspects(death).record(store, 1, [5, 8], alone=False)  # another process knew of some of them
    Suspects(3).record(store, 0, [7], alone=True)
    left = {1, 5, 7, 8} - {number for number in range(12) if number in store.finished()}
    assert suspects_of(store, store.finished()) == Suspects(4, alone=tuple(sorted(left)))
    summary = run_toy_batch(source, output, team=TOGETHER, resume=True)
    assert (summary.num_failed, summary.is_complete) == (0, True)
    assert [answer(one) for one in results_of(output)] == [expected(raw.rstrip(b"\n")) for raw in lines]
