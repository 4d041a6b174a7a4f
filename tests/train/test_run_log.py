"""A run's log: lines to read, and the same numbers as TensorBoard's curves."""

import json
import sys
import types
from pathlib import Path

import pytest

from mtp_jax.core.errors import ConfigError
from mtp_jax.train import run_log
from mtp_jax.train.run_log import RunLog

RECORD = {"step": 5, "loss": 2.0, "agreement": [0.5, 0.25], "evaluation": {"code": {"steps": 7}}}


def test_what_is_logged_is_a_line_and_a_point_of_each_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[tuple[str, float, int]] = []
    events: list[str] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            events.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            points.append((name, value, step))

        def close(self) -> None:
            events.append("closed")

    board = types.ModuleType("tensorboard")
    summary = types.ModuleType("tensorboard.summary")
    summary.Writer = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", board)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    monkeypatch.setattr(run_log, "find_spec", lambda name: name)
    with RunLog(tmp_path, tmp_path / "events") as log:
        log.write(RECORD)
    assert json.loads((tmp_path / "log.jsonl").read_text()) == RECORD
    assert points == [
        ("loss", 2.0, 5),
        ("agreement/1", 0.5, 5),
        ("agreement/2", 0.25, 5),
        ("evaluation/code/steps", 7.0, 5),
    ]
    assert events == [str(tmp_path / "events"), "closed"]


def test_events_without_the_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        RunLog(tmp_path, tmp_path / "events")
