"""The end-to-end suite on toy sizes: every part runs, and its arithmetic is right."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from mtp_jax.bench.suite.floors import Floor
from mtp_jax.bench.suite.loop import Backends
from mtp_jax.bench.suite.models import DENSE, MOE
from mtp_jax.bench.suite.run import SUITES, as_text, run_suite
from mtp_jax.bench.suite.setting import Findings, Row, Setting
from mtp_jax.cli import main

BF16 = 2


def test_the_dense_models_floor_is_that_of_its_issue() -> None:
    floor = Floor.of(DENSE.family(), BF16)
    no_context = floor.plain_bytes(1, context=0)
    assert no_context == pytest.approx(2.471e9, rel=1e-3)
    assert floor.step_bytes(1, 0, 3) / no_context == pytest.approx(1.81, abs=0.005)
    assert floor.step_bytes(1, 0, 3, DENSE.draft_vocab_size) / no_context == pytest.approx(1.25, abs=0.005)
    assert floor.plain_bytes(64, 900) - no_context == 64 * 900 * 16 * 2 * 8 * 64 * BF16


def test_the_expert_model_reads_active_experts_and_few_more_rows_read_many_more() -> None:
    floor = Floor.of(MOE.family(), BF16)
    assert floor.num_experts_read(1) == pytest.approx(6)
    assert floor.num_experts_read(64) == pytest.approx(64, rel=0.01)
    one = 3 * 2048 * 1408 * BF16
    assert floor.plain_bytes(2, 0) - floor.plain_bytes(1, 0) == pytest.approx(26 * one * (6 - 6 * 6 / 64))


def test_a_row_says_nothing_where_nothing_was_measured() -> None:
    assert Findings().floor_ms(1e9) is None
    text = as_text([Row("plain", 8, ms_per_step=2.0, floor_ms=1.6), Row("peer", note="not done")])
    assert "1.25" in text
    assert "None" not in text


def test_plain_decoding_is_held_against_a_floor_of_the_same_run(tmp_path: Path) -> None:
    saved = tmp_path / "suite.json"
    arguments = ["--suite", "h200", "--tiny", "--batch-sizes", "1", "--parts", "ceilings,plain", "--save", str(saved)]
    with redirect_stdout(StringIO()) as out:
        assert main(["bench", "decode", *arguments]) == 0
    line = json.loads(out.getvalue().splitlines()[-1])
    assert line == json.loads(saved.read_text())
    [step] = line["parts"]["plain"]["steps"]
    assert (step["batch_size"], step["tokens_per_slot"]) == (1, 1.0)
    assert line["parts"]["ceilings"]["copy_tb_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--suite", "h200", "--repeats", "5"], "--repeats does nothing under --suite"),
        (["--suite", "h200", "--parts", "speed"], "'speed'; parts of h200 are ceilings, plain"),
        (["--parts", "plain"], "--parts goes with --suite"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.long
def test_every_part_runs_on_toy_sizes() -> None:
    parts = [part for part in SUITES["h200"] if part != "peers"]  # needs torch
    setting = Setting.tiny(Backends("reference", dtype="float32"), (1, 2))
    findings = run_suite(setting, parts)
    assert set(findings.figures) == set(parts)
    assert findings.figures["tokens"]["num_equal"] == 2
    drafting = [row for row in findings.rows if row.what.startswith("K=3")]
    assert all(row.against_plain is not None and row.efficiency is not None for row in drafting)
