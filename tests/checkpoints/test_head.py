"""MTP layers in a folder of their own: laid over their model they are the whole model again; over another, refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.checkpoints import CheckpointError, LoadedModel, load_model, save_hf_model, write_hf
from mtp_jax.checkpoints.head import HEAD_FILE, MTP_ROOT, add_head, fingerprint, write_head
from mtp_jax.checkpoints.token_ranking import write_ranking
from mtp_jax.models.registry import family_from_config
from mtp_jax.train.new_layers import with_new_layers
from tests.checkpoints.support import assert_same_bits
from tests.models.dense_goldens import CONFIGS

CONFIG: dict[str, Any] = CONFIGS["smollm2"]


@pytest.fixture
def trunk(tmp_path: Path) -> LoadedModel:
    family = family_from_config(CONFIG)
    write_hf(family, family.init_weights(jax.random.key(3), jnp.bfloat16), CONFIG, tmp_path / "trunk")
    return load_model(tmp_path / "trunk")


@pytest.fixture
def head(trunk: LoadedModel, tmp_path: Path) -> Path:
    family, weights, _ = with_new_layers(trunk.family, trunk.weights, CONFIG, 1, seed=0)
    folder = tmp_path / "head"
    folder.mkdir()
    write_head(folder, family, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights), "trunk")
    return folder


def test_a_head_laid_over_its_model_is_bit_for_bit_what_was_written(
    trunk: LoadedModel, head: Path, tmp_path: Path
) -> None:
    write_ranking(head, [5, 3, 1])
    joined, config = add_head(trunk, CONFIG, head)
    assert (joined.family.num_mtp_layers, config["num_nextn_predict_layers"]) == (1, 1)
    assert_same_bits({name: leaf for name, leaf in joined.weights.items() if name != MTP_ROOT}, dict(trunk.weights))
    save_hf_model(tmp_path / "trunk", tmp_path / "joined", head=head)
    whole = load_model(tmp_path / "joined")
    assert whole.family == joined.family
    assert whole.tokens_by_rank == joined.tokens_by_rank == (5, 3, 1)
    assert_same_bits(whole.weights, joined.weights)
    stored = load_file(head / "model.safetensors")
    assert all(name.startswith(f"model.layers.{CONFIG['num_hidden_layers']}.") for name in stored)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in stored)


def test_a_new_layer_lets_the_hidden_state_through(trunk: LoadedModel) -> None:
    family, weights, _ = with_new_layers(trunk.family, trunk.weights, CONFIG, 1, seed=0)
    random = family.init_weights(jax.random.key(0), jnp.float32)[MTP_ROOT]["0"]["join"]
    size = family.hidden_size
    added = weights[MTP_ROOT]["0"]["join"] - random
    assert jnp.allclose(added[size:], jnp.eye(size), atol=1e-6)
    assert not added[:size].any()


def test_the_fingerprint_is_of_the_values_and_not_of_the_dtype(trunk: LoadedModel) -> None:
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trunk.weights)
    assert fingerprint(trunk.family, wide) == fingerprint(trunk.family, trunk.weights)
    other = {**trunk.weights, "embedding": trunk.weights["embedding"] * 2}
    assert fingerprint(trunk.family, other) != fingerprint(trunk.family, trunk.weights)


def test_what_does_not_fit_is_refused_by_name(trunk: LoadedModel, head: Path, tmp_path: Path) -> None:
    joined, config = add_head(trunk, CONFIG, head)
    with pytest.raises(CheckpointError, match="has 1 MTP layers already"):
        add_head(joined, config, head)

    facts = json.loads((head / HEAD_FILE).read_text())
    (head / HEAD_FILE).write_text(json.dumps({**facts, "trunk_fingerprint": "0"}))
    with pytest.raises(CheckpointError, match=r"was trained for 'trunk', and .* is another model"):
        add_head(trunk, CONFIG, head)
    (head / HEAD_FILE).write_text(json.dumps({**facts, "num_mtp_layers": None}))
    with pytest.raises(CheckpointError, match="num_mtp_layers None"):
        add_head(trunk, CONFIG, head)
    (head / HEAD_FILE).write_text(json.dumps(facts))

    tensors = load_file(head / "model.safetensors")
    name = next(name for name in tensors if name.endswith("eh_proj.weight"))
    lost = tensors.pop(name)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor .*eh_proj"):
        add_head(trunk, CONFIG, head)
    save_file({**tensors, name: lost[:1]}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match="of shape"):
        add_head(trunk, CONFIG, head)
    (head / HEAD_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"head\.json is missing"):
        add_head(trunk, CONFIG, head)
