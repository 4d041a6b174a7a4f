"""Recorded measurements are of one form, say where they come from, and hold no figure that cannot be."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.repository import ROOT

FOLDER = ROOT / "docs" / "measurements"
TEXTS = ("measured", "date", "chip", "command")
H200_TBPS, H200_TFLOPS = 4.8, 990.0  # of NVIDIA's data sheet: nothing is faster


def problems(file: Mapping[str, Any]) -> list[str]:
    """What is wrong with a file of measurements, by docs/measurements/README.md."""
    found = [f"{name} is missing" for name in TEXTS if not isinstance(file.get(name), str) or not file[name].strip()]
    if unknown := file.keys() - {*TEXTS, "versions", "notes", "results"}:
        found.append(f"unknown fields {sorted(unknown)}")
    if not isinstance(file.get("versions"), dict) or "jax" not in file["versions"]:
        found.append("versions lacks jax")
    try:
        datetime.date.fromisoformat(file.get("date", ""))
    except ValueError:
        found.append("date is no date")
    results = file.get("results")
    if not isinstance(results, list) or not results:
        return [*found, "results is no list"]
    names = [result.get("name") for result in results]
    if len(set(names)) < len(names) or None in names:
        found.append("results without names of their own")
    is_h200 = "H200" in file.get("chip", "")
    for result in results:
        if is_h200 and result.get("TBps", 0) > H200_TBPS:
            found.append(f"{result['name']} moves {result['TBps']} TB/s, more than the card can")
        if is_h200 and result.get("TFLOPs", 0) > H200_TFLOPS:
            found.append(f"{result['name']} does {result['TFLOPs']} TFLOP/s, more than the card can")
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_a_measurement_says_where_it_comes_from(path: Path) -> None:
    assert problems(json.loads(path.read_text())) == []


def test_what_is_wrong_is_seen() -> None:
    good = {
        "measured": "a copy",
        "date": "2026-11-30",
        "chip": "NVIDIA H200 x 1",
        "versions": {"jax": "0.11.2"},
        "command": "python copy.py",
        "results": [{"name": "copy", "TBps": 4.3}],
    }
    assert problems(good) == []
    assert problems({**good, "date": "yesterday"}) == ["date is no date"]
    assert problems({**good, "command": " "}) == ["command is missing"]
    assert problems({**good, "versions": {}}) == ["versions lacks jax"]
    assert problems({**good, "results": [{"name": "copy", "TBps": 9.0}]}) == [
        "copy moves 9.0 TB/s, more than the card can"
    ]
