"""`mtp-jax bench attention` where there is no GPU to time, and which cases its options mean."""

import pytest

from kernels_pallas.bench import selected
from kernels_pallas.bench_cases import CHECKS, TIMES
from mtp_jax.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [([], "this machine offers 'cpu'"), (["--jobs", "0"], "--jobs is 0; it must be at least 1")],
)
def test_what_cannot_be_done_gets_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "attention", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_options_choose_cases() -> None:
    assert selected([], checks=True, times=True) == [*CHECKS, *TIMES]
    assert selected([], checks=False, times=True) == TIMES
    only = selected(["gqa W4", "mla16"], checks=True, times=False)
    assert only == [case for case in CHECKS if "gqa W4" in case.name or "mla16" in case.name]
    assert only
    assert selected(["no such case"], checks=True, times=True) == []
