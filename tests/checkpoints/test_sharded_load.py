"""Weights on a mesh: from one device to eight to two and back the same arrays, each device sent its part alone."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mtp_jax.checkpoints import load_model, restore_weights, save_orbax_model, save_weights, write_hf
from mtp_jax.checkpoints.orbax_io import flatten, unflatten
from mtp_jax.core.config import MeshConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.registry import family_from_config
from mtp_jax.models.sharding import weight_specs
from mtp_jax.ops.placement import Placement
from tests.checkpoints.support import assert_same_bits
from tests.models.dense_goldens import CONFIGS

CONFIG = {**CONFIGS["llama"], "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
EIGHT, TWO = MeshConfig(data=2, model=4), MeshConfig(data=1, model=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = family_from_config(CONFIG)
    to = tmp_path_factory.mktemp("model") / "hf"
    write_hf(family, family.init_weights(jax.random.key(0), jnp.float32), CONFIG, to)
    return to


def targets(family: ModelFamily, mesh: MeshConfig) -> Any:
    placement = Placement.of(mesh)
    specs = flatten(weight_specs(family, placement.rules))
    return unflatten(
        {
            "/".join(tensor.path): jax.ShapeDtypeStruct(
                tensor.shape, jnp.float32, sharding=placement.sharding(specs["/".join(tensor.path)])
            )
            for tensor in family.tensors()
        }
    )


def test_one_to_eight_to_two_devices_and_back_gives_equal_arrays(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(folder)
    save_weights(loaded.weights, tmp_path / "one")
    on_eight = restore_weights(tmp_path / "one", target=targets(loaded.family, EIGHT))
    save_weights(on_eight, tmp_path / "eight")
    on_two = restore_weights(tmp_path / "eight", target=targets(loaded.family, TWO))
    save_weights(on_two, tmp_path / "two")
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(on_eight)} == {8}
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(on_two)} == {2}
    for weights in (on_eight, on_two, restore_weights(tmp_path / "two")):
        assert_same_bits(weights, dict(loaded.weights))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_a_model_is_loaded_onto_a_mesh_as_an_engine_wants_it(
    folder: Path, tmp_path: Path, form: str, dtype: str | None
) -> None:
    if form == "orbax":
        save_orbax_model(folder, tmp_path / "orbax")
    loaded = load_model(folder if form == "hf" else tmp_path / "orbax", dtype=dtype, mesh=EIGHT)
    assert_same_bits(loaded.weights, dict(load_model(folder, dtype=dtype).weights))
    placement = Placement.of(EIGHT)
    specs = weight_specs(loaded.family, placement.rules)
    for name, leaf in flatten(loaded.weights).items():
        wanted = flatten(specs)[name]
        assert isinstance(leaf.sharding, NamedSharding)
        assert leaf.sharding.is_equivalent_to(placement.sharding(wanted), leaf.ndim), name
    q = loaded.weights["layers"]["0"]["attention"]["qkv"]
    assert q.addressable_shards[0].data.size == q.size // 4


def test_a_mesh_that_does_not_divide_the_model_is_refused_before_any_data_is_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has \d+ .*; mesh={'data': 1, 'model': 3} needs a multiple of 3"):
        load_model(folder, mesh=MeshConfig(data=1, model=3))


def test_the_host_holds_one_array_at_a_time(tmp_path: Path) -> None:
    """On its way to the devices no more of a model is in numpy's memory than a few times its largest array."""
    sizes = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 512}
    config = {**CONFIG, **sizes}
    family = family_from_config(config)
    write_hf(family, family.init_weights(jax.random.key(0), jnp.float32), config, tmp_path, overwrite=True)
    load_model(tmp_path, mesh=EIGHT)  # what the libraries keep for good is taken now
    largest = max(4 * int(np.prod(tensor.shape)) for tensor in family.tensors())
    total = sum(4 * int(np.prod(tensor.shape)) for tensor in family.tensors())
    assert total > 15 * largest
    gc.collect()
    tracemalloc.start()
    try:
        loaded = load_model(tmp_path, mesh=EIGHT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert loaded.family == family
    assert peak < 4 * largest, f"{peak} bytes at the peak; the largest array has {largest}, all have {total}"
