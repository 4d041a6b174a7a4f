"""The toy family behind the command line: one letter a token, and no file but its tokenizer."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mtp_jax.checkpoints import LoadedModel
from mtp_jax.core.config import MeshConfig
from mtp_jax.testing.toy_family import ToyFamily

ALPHABET = f"{string.ascii_lowercase} .,"
UseModel = Callable[..., ToyFamily]


def save_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(ALPHABET)}, unk_token=","))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def toy_model(monkeypatch: pytest.MonkeyPatch, folder: Path) -> UseModel:
    """Puts a toy model behind `--model`; call the result to put another there. `folder` gets its tokenizer."""
    save_tokenizer(folder)

    def use(*, has_tokenizer: bool = True, **settings: Any) -> ToyFamily:
        family = ToyFamily(**settings)
        weights = family.init_weights(jax.random.key(0), jnp.float32)
        home = folder if has_tokenizer else folder / "nothing"

        def load(model: str, *, dtype: str | None, mesh: MeshConfig | None) -> LoadedModel:
            assert model == "tiny-mtp"
            return LoadedModel(family, weights, home, dtype or "float32")

        monkeypatch.setattr("mtp_jax.cli.start.load_model", load)
        return family

    use()
    return use


@pytest.fixture(autouse=True)
def use_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UseModel:
    """A toy model for every test; a test may call this for another."""
    return toy_model(monkeypatch, tmp_path)
