"""The bar while an engine compiles."""

import sys
import warnings

import jax
import pytest

from mtp_jax.llm import LLM
from mtp_jax.options import engine_config
from mtp_jax.progress import num_programs
from mtp_jax.testing.toy_family import ToyFamily


def test_the_bar_expects_as_many_programs_as_the_engine_compiles() -> None:
    """One MTP layer per draft position: a model with two of them drafts two tokens at most."""
    family = ToyFamily(num_mtp_layers=2)
    config = engine_config(family, {"num_speculative_tokens": 3}, max_model_len=64, max_num_seqs=8)
    with warnings.catch_warnings(action="error"):
        assert num_programs(family, config) == 2 + 2 * 3  # two prompt chunks; two slot buckets, 0 to 2 drafts


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_start_shows_its_bar_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    family = ToyFamily()
    LLM.from_weights(
        family, family.init_weights(jax.random.key(0), None), max_model_len=16, max_num_seqs=1, prefill_chunk=16
    )
    assert ("compiling: 100%" in capsys.readouterr().err) is is_terminal
