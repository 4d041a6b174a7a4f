"""`bench decode`: every variant is there, the figures agree with each other, the last line is JSON."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.bench.prompts import tokens_of
from mtp_jax.cli import main
from mtp_jax.core.errors import ConfigError
from tests.cli.conftest import toy_model

TREE = "method=dynamic_tree,num_speculative_tokens=2,tree_topk=2,tree_nodes=3"
ARGUMENTS = (
    "bench",
    "decode",
    "--max-tokens",
    "20",
    "--num-speculative-tokens",
    "2",
    "--repeats",
    "2",
    "--compile-cache",
)
Report = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What the command prints for one request at a time and for two: the tables, and the last line."""
    folder = tmp_path_factory.mktemp("report")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "some text"}\n\n{"turns": ["some more", "ignored"]}\n')
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(StringIO()) as out:
        toy_model(monkeypatch, folder)(draft_hit_percent=60)
        assert main([*ARGUMENTS, "--batch-sizes", "1", "2", "--prompts", str(prompts), "--against", TREE]) == 0
    *text, last = out.getvalue().splitlines()
    return "\n".join(text), json.loads(last)


def test_every_variant_is_measured_and_equal_to_plain(report: Report) -> None:
    text, facts = report
    assert facts["bench"] == "decode"
    assert facts["attention_backend"] == "reference"
    assert facts["versions"]["jax"] in text
    assert [result["batch_size"] for result in facts["results"]] == [1, 2]
    for result in facts["results"]:
        variants = result["variants"]
        assert list(variants) == ["plain", "K=0", "K=1", "K=2", "goodput", TREE]
        assert [variant["rows_per_step"] for variant in variants.values()] == [1, 1, 2, 3, None, 4]
        for name, variant in variants.items():
            assert name in text
            assert variant["num_requests_different_from_plain"] == 0
            assert len(variant["tokens_per_s_runs"]) == 2
            ratio = variant["tokens_per_s"] / variants["plain"]["tokens_per_s"]
            assert variant["ratio_to_plain"] == pytest.approx(ratio, rel=0.01)
        assert set(result["compile_s"]) == {"drafting", "plain", TREE}
        buckets = [1] if result["batch_size"] == 1 else [1, 2]
        assert set(result["step_cost_ms"]) == {f"slots={slots},K={k}" for slots in buckets for k in range(3)}


def test_fixed_lengths_stay_fixed_and_rates_fit_together(report: Report) -> None:
    one_slot = report[1]["results"][0]["variants"]
    assert set(one_slot["plain"]["steps_by_draft_len"]) == set(one_slot["K=0"]["steps_by_draft_len"]) == {"0"}
    assert one_slot["plain"]["steps_by_draft_len"]["0"] == 2 * 19  # two runs; the prompt gives the first token
    assert one_slot["plain"]["mean_acceptance_length"] == 1
    for draft_len in (1, 2):
        variant = one_slot[f"K={draft_len}"]
        assert max(variant["steps_by_draft_len"], key=variant["steps_by_draft_len"].get) == str(draft_len)
        assert len(variant["acceptance_unconditional"]) == draft_len
        assert 1 < variant["mean_acceptance_length"] <= 1 + draft_len
        assert variant["acceptance_unconditional"][0] == variant["acceptance_conditional"][0]
    two = one_slot["K=2"]
    assert two["acceptance_unconditional"][1] <= two["acceptance_conditional"][1]


def test_more_requests_than_prompts_begin_again() -> None:
    assert tokens_of([[1, 2], [3]], None, 3) == ((1, 2), (3,), (1, 2))
    with pytest.raises(ConfigError, match="no tokenizer"):
        tokens_of(["text"], None, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "no prompts"), ("{}", "line 1"), ('{"prompt": 5}', "line 1"), ("\n[", "line 2"), ('{"turns": []}', "line 1")],
)
def test_bad_prompt_files_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, named: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    assert main([*ARGUMENTS, "--prompts", str(prompts)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("method", "'method' is not of the form FIELD=VALUE"),
        ("method=tree", "method is 'tree'"),
        ("topk=2", "speculative_config has no field 'topk'"),
        ("method=dynamic_tree,tree_nodes=2", "tree_nodes is 2, below num_speculative_tokens=3"),
    ],
)
def test_bad_configurations_to_time_against_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, named: str
) -> None:
    toy_model(monkeypatch, tmp_path)()
    assert main([*ARGUMENTS, "--against", text]) == 2
    assert named in capsys.readouterr().err
