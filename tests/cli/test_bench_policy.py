"""`bench policy`: every variant drains the same batch, the figures agree, and what it saves can be simulated."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.bench.drain import Recording, drain, unequal_lengths
from mtp_jax.cli import main
from mtp_jax.policies.fixed import FixedDraftLen
from tests.cli.conftest import toy_model

ARGUMENTS = ("bench", "policy", "--requests", "9", "--max-tokens", "40", "--num-speculative-tokens", "1")
VARIANTS = ["K=0", "K=1", "goodput"]
Report = tuple[str, dict[str, Any], Path]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The tables that the command prints, its last line, and the file it saves."""
    folder = tmp_path_factory.mktemp("report")
    prompts, saved = folder / "prompts.jsonl", folder / "recording.json"
    prompts.write_text('{"prompt": "some text"}\n{"prompt": "more"}\n')
    files = ("--prompts", str(prompts), "--save", str(saved))
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(StringIO()) as out:
        toy_model(monkeypatch, folder)(draft_hit_percent=60)
        assert main([*ARGUMENTS, "--repeats", "2", "--compile-cache", *files]) == 0
    *text, last = out.getvalue().splitlines()
    return "\n".join(text), json.loads(last), saved


def test_every_variant_drains_the_batch_to_the_same_tokens(report: Report) -> None:
    text, facts, _ = report
    assert list(facts["variants"]) == VARIANTS
    assert facts["best_fixed"] in VARIANTS[:-1]
    for name, variant in facts["variants"].items():
        assert name in text
        assert variant["num_requests_different_from_k0"] == 0
        assert len(variant["tokens_per_s_runs"]) == 2
        assert list(variant["ratio_to_k0_by_slots"]) == ["9", "8", "1"]
        ratio = variant["tokens_per_s"] / facts["variants"]["K=0"]["tokens_per_s"]
        assert variant["ratio_to_k0"] == pytest.approx(ratio, rel=0.01)
    assert facts["variants"][facts["best_fixed"]]["ratio_to_best_fixed"] == 1
    assert set(facts["variants"]["K=0"]["steps_by_draft_len"]) == {"0"}
    assert set(facts["variants"]["K=0"]["ratio_to_k0_by_slots"].values()) == {1}


def test_what_is_saved_is_what_the_simulated_drain_reads(report: Report) -> None:
    _, facts, saved = report
    recording = Recording.read(saved)
    assert recording == Recording.of_dict(facts["recording"])
    assert set(recording.warm_up_s) == {(slots, k) for slots in (1, 8, 9) for k in (0, 1)}
    assert set(recording.in_use_s) == set(recording.warm_up_s)
    assert 0 < recording.rates[0] < 1
    drained = drain(recording, FixedDraftLen(), unequal_lengths(9, 40))
    assert drained.phases == (9, 8, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--method", "none"), "--method"),
        (("--requests", "0"), "--requests is 0"),
        (("--max-tokens", "1"), "--max-tokens is 1"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--mesh", "data=2"), "--mesh"),
        (("--save", "no/such/folder/file.json"), "--save"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    assert main(["bench", "policy", *arguments]) == 2
    assert named in capsys.readouterr().err
