"""A trained model's folder loads as the very weights that its figures were measured with."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.checkpoints import load_model
from mtp_jax.models.registry import family_from_config
from mtp_jax.train.export import rounded, write_model
from tests.train.tiny import TINY


def test_a_written_model_loads_with_the_values_it_was_measured_with(tmp_path: Path) -> None:
    config = {**TINY, "dtype": "bfloat16"}
    family = family_from_config(config)
    weights = family.init_weights(jax.random.key(0), jnp.float32)
    num_bytes = write_model(tmp_path, family, weights, config)
    assert num_bytes == (tmp_path / "model.safetensors").stat().st_size
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.family == family
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, rounded(family, weights))
    assert load_model(tmp_path).dtype == "bfloat16"
