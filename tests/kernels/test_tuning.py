"""The tuning tables: what stands in them fits, and a call finds its entry."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernels_pallas import tune
from kernels_pallas.bench_cases import SHAPES, Case
from kernels_pallas.paged_attention import mosaic_gpu_tile
from kernels_pallas.paged_attention.mosaic_gpu_tile import SMEM_BYTES, default_tile, smem_bytes, table_key, tuned_tile

TABLES = sorted((Path(mosaic_gpu_tile.__file__).parent / "tuning").glob("*.json"))
GQA = replace(SHAPES["gqa W1"], name="gqa W1")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_each_key_stands_once_in_a_table(path: Path) -> None:
    keys = [json.dumps(entry["key"]) for entry in json.loads(path.read_text())["entries"]]
    assert keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", SHAPES)
def test_a_tuned_shape_fits_into_shared_memory(name: str) -> None:
    problem = SHAPES[name].problem()
    assert smem_bytes(problem, tuned_tile(problem, "NVIDIA H200")) <= SMEM_BYTES


def test_a_key_of_the_table_takes_its_entry_and_any_other_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gpu_tile, "_TABLES", tmp_path)
    problem = GQA.problem()
    entry = {"key": table_key(problem), "tile": {"num_stages": 3}, "us": 1.0}
    tune.write_table(mosaic_gpu_tile.table_path("Test Chip"), "Test Chip", [entry])
    default = default_tile(problem)
    assert default.num_stages != 3
    assert tuned_tile(problem, "Test Chip") == replace(default, num_stages=3)
    assert tuned_tile(problem, "Another Chip") == default
    for change in ({"num_rows": 2}, {"page_size": 32}, {"num_q_heads": 16}, {"dtype": "float16"}):
        changed = replace(problem, **change)
        assert tuned_tile(changed, "Test Chip") == default_tile(changed)


def test_an_entry_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu_tile, "_TABLES", tmp_path)
    entry = {"key": table_key(GQA.problem()), "tile": {"num_stages": 9}, "us": 1.0}
    tune.write_table(mosaic_gpu_tile.table_path("Test Chip"), "Test Chip", [entry])
    with pytest.raises(ValueError, match="does not fit"):
        tuned_tile(GQA.problem(), "Test Chip")


def test_writing_a_table_keeps_the_entries_of_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    tune.write_table(path, "chip", [{"key": 1, "tile": {}, "us": 1.0}, {"key": 2, "tile": {}, "us": 2.0}])
    tune.write_table(path, "chip", [{"key": 2, "tile": {}, "us": 3.0}])
    assert [(entry["key"], entry["us"]) for entry in json.loads(path.read_text())["entries"]] == [(1, 1.0), (2, 3.0)]


def test_the_best_tile_is_right_and_fastest_over_all_lengths_of_its_key() -> None:
    shapes = [GQA, replace(SHAPES["gqa W1 ragged"], name="gqa W1 ragged")]
    first, second, third = (tuple(case.name for case in pair) for pair in _options(shapes)[:3])
    results = {case.name: {"error": "not started"} for shape in shapes for case in tune.candidates(shape)}
    results |= {first[0]: _took(1.0), first[1]: _took(9.0), second[0]: _took(4.0), second[1]: _took(4.0)}
    results |= {third[0]: _took(0.1), third[1]: {**_took(0.1), "error": "wrong"}}
    entries, num_keys = tune.best_entries(shapes, results)
    assert num_keys == 1
    assert entries == [{"key": table_key(GQA.problem()), "tile": dict(_options(shapes)[1][0].tile), "us": 4.0}]


def _options(shapes: list[Case]) -> list[tuple[Case, ...]]:
    return list(zip(*map(tune.candidates, shapes), strict=True))


def _took(us: float) -> dict[str, float]:
    return {"us": us}
