"""The head that comes with the project: small, of the right names and shapes, and with all that its card promises."""

import json

import pytest

from mtp_jax.checkpoints.assemble import check_names_and_shapes
from mtp_jax.checkpoints.catalogue import PULLABLE
from mtp_jax.checkpoints.folders import bundled_head
from mtp_jax.checkpoints.head import HEAD_FILE, MtpLayers
from mtp_jax.checkpoints.safetensors_io import SafetensorsReader
from mtp_jax.checkpoints.token_ranking import read_ranking
from mtp_jax.models.registry import family_from_config

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 1,
}
LARGEST_BYTES = 10_000_000


@pytest.mark.parametrize("name", PULLABLE)
def test_every_model_that_can_be_pulled_has_its_head_here(name: str) -> None:
    folder = bundled_head(PULLABLE[name].head)
    assert folder is not None
    assert json.loads((folder / HEAD_FILE).read_text())["trunk"] == name
    assert sum(file.stat().st_size for file in folder.iterdir()) < LARGEST_BYTES
    assert (folder / "README.md").read_text().startswith("---\nlicense: apache-2.0")


def test_the_head_of_smollm2_has_the_names_and_shapes_of_its_layer() -> None:
    folder = bundled_head("smollm2-mtp")
    assert folder is not None
    family = family_from_config(SMOLLM2)
    with SafetensorsReader(folder) as reader:
        check_names_and_shapes(MtpLayers(family), reader)
        for name in reader.tensors:
            reader.read(name)  # which says so if it holds a NaN
    ranking = read_ranking(folder, family.vocab_size)
    assert ranking is not None
    assert len(ranking) >= 8192
