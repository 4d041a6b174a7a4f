"""Files that are there and are not what they should be: one sentence each."""

from pathlib import Path
from typing import Any

import pytest

from mtp_jax.checkpoints.folders import find_model, read_config
from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.engine import Engine
from mtp_jax.models.registry import family_from_config
from mtp_jax.testing.toy_family import ToyFamily
from mtp_jax.text import encode, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_v3_tiny"


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)


def test_a_config_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(tmp_path)


def test_a_config_that_says_two_things(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": {"layers": 3, "layers": 4}}')
    with pytest.raises(ConfigError, match="has 'layers' twice: 3 and 4"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"layers": 3, "layers": 3}')
    assert read_config(tmp_path) == {"layers": 3}


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        load_tokenizer(tmp_path)


def test_text_that_utf8_cannot_write() -> None:
    tokenizer = load_tokenizer(find_model("tiny-mtp"))
    assert tokenizer is not None
    with pytest.raises(ConfigError, match="surrogate"):
        encode(tokenizer, "a\udcff")


@pytest.mark.parametrize("model", [None, 5, b"tiny-mtp"])
def test_a_model_that_is_no_name(model: Any) -> None:
    with pytest.raises(ConfigError, match="model is"):
        find_model(model)


@pytest.mark.parametrize(
    "odd",
    [
        {"model_type": ["deepseek_v3"]},
        {"rope_parameters": {"rope_type": ["yarn"]}},
        {"layer_types": 5},
        {"eos_token_id": True},
    ],
)
def test_config_fields_of_odd_types(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        family_from_config({**read_config(GOLDEN), **odd})


def test_more_end_of_text_ids_than_a_launch_has_room_for() -> None:
    with pytest.raises(ConfigError, match="33 end-of-text ids"):
        Engine(ToyFamily(eos_token_ids=tuple(range(33))), {}, EngineConfig(max_model_len=8))
