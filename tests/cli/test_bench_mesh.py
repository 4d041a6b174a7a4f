"""`bench mesh` from the command line: tokens, speed and the vote in one call; usage errors before anything."""

import json

import pytest

from mtp_jax.bench.intervals import FEWEST
from mtp_jax.checkpoints import LoadedModel
from mtp_jax.cli import main
from mtp_jax.core.config import MeshConfig
from mtp_jax.models.sharding import weight_specs
from mtp_jax.ops.placement import Placement
from tests.cli.conftest import UseModel


@pytest.mark.long
def test_a_mesh_against_one_device(
    monkeypatch: pytest.MonkeyPatch, use_model: UseModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model goes to wherever it is loaded for, as a real one does: one device could not run it from a mesh."""
    family = use_model(vocab_size=30)
    from mtp_jax.cli import start

    load = start.load_model

    def load_for(model: str, *, dtype: str | None, mesh: MeshConfig | None) -> LoadedModel:
        loaded = load(model, dtype=dtype, mesh=mesh)
        placement = Placement.of(mesh or MeshConfig())
        weights = placement.put(loaded.weights, weight_specs(family, placement.rules))
        return LoadedModel(family, weights, loaded.folder, loaded.dtype)

    monkeypatch.setattr("mtp_jax.cli.start.load_model", load_for)
    counts = ("--requests", "3", "--speed-requests", "3", "--speed-tokens", "4", "--repeats", "1")
    sizes = ("--slots", "2", "--num-speculative-tokens", "1", "--vote-rounds", str(FEWEST))
    assert main(["bench", "mesh", "--mesh", "data=2", *counts, *sizes]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["differences"] == []
    assert [vote["shape"]["draft_len"] for vote in facts["votes"]] == [1, 0]
    assert len(facts["scaling"]["ratios"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "bench mesh needs --mesh"),
        (("--mesh", "data=2", "--requests", "-1"), "--requests is -1; it must be at least 0"),
        (("--mesh", "data=2", "--vote-rounds", "5"), "--vote-rounds is 5; it must be 0, or at least 6"),
        (("--mesh", "data=2", "--speed-tokens", "0"), "--speed-tokens is 0; it must be at least 1"),
        (("--mesh", "data=2", "--random-weights", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_usage(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mesh", *arguments]) == 2
    assert said in capsys.readouterr().err
