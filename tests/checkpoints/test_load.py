"""`load_model`: what a name means, and configs that contradict the tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_jax.checkpoints import CheckpointError, bundled_names, bundled_path, folders, load_model
from mtp_jax.core.errors import ConfigError
from tests.checkpoints.support import GOLDENS, SMALL, assert_same_bits, golden_config, golden_tensors, write_model


def bundle(root: Path, monkeypatch: pytest.MonkeyPatch, *, is_packaged: bool) -> Path:
    """A bundled model "tiny" of an installation below `root`; returns its folder."""
    package = root / "site" / "mtp_jax"
    monkeypatch.setattr(folders, "__file__", str(package / "checkpoints" / "folders.py"))
    return write_model((package / "_bundled" if is_packaged else root / "site" / "checkpoints") / "tiny")


@pytest.mark.parametrize("is_packaged", [True, False])
def test_a_bundled_name_is_found_in_the_repository_and_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packaged: bool
) -> None:
    folder = bundle(tmp_path, monkeypatch, is_packaged=is_packaged)
    (folder.parent / "no-model").mkdir()
    assert bundled_names() == ("tiny",)
    assert bundled_path("tiny") == folder
    assert load_model("tiny").folder == folder


def test_a_path_is_a_folder_even_if_it_is_called_like_a_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle(tmp_path, monkeypatch, is_packaged=True)
    here = write_model(tmp_path / "here" / "tiny")
    monkeypatch.chdir(here.parent)
    assert load_model(Path("tiny")).folder.resolve() == here
    assert load_model("./tiny").folder.resolve() == here


def test_an_unknown_model_is_answered_with_the_path_and_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle(tmp_path, monkeypatch, is_packaged=False)
    with pytest.raises(
        CheckpointError, match=r"^model 'nowhere/x' does not exist; give .* bundled model \('tiny'\)\.$"
    ):
        load_model("nowhere/x")
    with pytest.raises(CheckpointError, match=r"^'giant' is no bundled model; bundled: 'tiny'\.$"):
        bundled_path("giant")
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; give a model folder"):
        load_model(file)
    with pytest.raises(CheckpointError, match=r"model\.gguf is missing"):
        load_model("model.gguf")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "config.json is missing"), ("{", "config.json is not JSON"), ("[]", "config.json must hold a JSON object")],
)
def test_a_config_that_is_no_config(tmp_path: Path, text: str | None, sentence: str) -> None:
    file = write_model(tmp_path) / "config.json"
    file.unlink() if text is None else file.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tmp_path)


def test_metadata_is_ignored_and_what_changes_the_computation_is_refused(tmp_path: Path) -> None:
    trained_by = golden_config() | {"trained_by": "us", "sliding_window": None}
    load_model(write_model(tmp_path, config=trained_by))
    with pytest.raises(ConfigError, match="'sliding_window' is 64"):
        load_model(write_model(tmp_path, config=golden_config() | {"sliding_window": 64}))
    with pytest.raises(ConfigError, match="'model_type' is 'gpt2'; allowed"):
        load_model(write_model(tmp_path, config=golden_config() | {"model_type": "gpt2"}))


# fmt: off
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_nextn_predict_layers": 2}, "is 2 but the checkpoint has 1 MTP layers"),
    ({"num_nextn_predict_layers": 0}, "is 0 but the checkpoint has 1 MTP layers"),
    ({"num_mtp_layers": 2}, "num_nextn_predict_layers=1 and num_mtp_layers=2; they must be equal"),
    ({"num_hidden_layers": 2}, r"MTP layers are \[3\]"),
]
# fmt: on


@pytest.mark.parametrize(("change", "sentence"), CONTRADICTIONS)
def test_contradictory_numbers_of_mtp_layers(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_model(write_model(tmp_path, config=golden_config() | change))


def test_tensors_settle_the_number_of_mtp_layers_where_the_config_is_silent(tmp_path: Path) -> None:
    config = golden_config()
    del config["num_nextn_predict_layers"]
    assert load_model(write_model(tmp_path / "one", config=config)).family.num_mtp_layers == 1
    tensors = {name: array for name, array in golden_tensors().items() if not name.startswith("model.layers.3.")}
    assert load_model(write_model(tmp_path / "none", tensors, config)).family.num_mtp_layers == 0


def test_a_dtype_that_is_none_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype is 'int8'; allowed: None, 'bfloat16', 'float16', 'float32'"):
        load_model(GOLDENS / SMALL, dtype="int8")
    with pytest.raises(CheckpointError, match="config field 'dtype' is 'float64'"):
        load_model(write_model(tmp_path, config=golden_config() | {"dtype": "float64"}))
    with pytest.raises(CheckpointError, match="'dtype' and 'torch_dtype' name several dtypes"):
        load_model(write_model(tmp_path, config=golden_config() | {"torch_dtype": "bfloat16"}))


def test_tensors_of_several_dtypes_need_a_choice(tmp_path: Path) -> None:
    tensors = golden_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    folder = write_model(tmp_path, tensors, golden_config() | {"dtype": None})
    with pytest.raises(CheckpointError, match=r"the tensors name several dtypes \(float16, float32\)"):
        load_model(folder)
    assert load_model(folder, dtype="float32").dtype == "float32"


def test_dtype_none_reads_torch_dtype_too(tmp_path: Path) -> None:
    config = golden_config() | {"dtype": None, "torch_dtype": "float32"}
    assert_same_bits(load_model(write_model(tmp_path, config=config)).weights, load_model(GOLDENS / SMALL).weights)
