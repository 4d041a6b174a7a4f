"""The same forward under `shard_map`, heads and feed-forward over `model`, experts and vocabulary over both axes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jaxtyping import Array

from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config
from mtp_jax.models.sharding import weight_specs
from mtp_jax.ops.placement import AxisRules
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from tests.models.shapes import config_of
from tests.models.support import DenseAttend, dense_kv, pack_weights, positions_of, random_checkpoint

NUM_SLOTS, WIDTH = 8, 3
MESHES = ({"data": 2, "model": 4}, {"model": 8}, {"data": 8})


# One of each kind of attention and feed-forward; Qwen and MiMo are Llama's.
@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "llama"])
def family(request: pytest.FixtureRequest) -> ModelFamily:
    config = config_of(request.param, num_attention_heads=8, num_hidden_layers=2)
    if "n_shared_experts" in config:
        config["n_shared_experts"] = 2
    if "num_key_value_heads" in config:
        config |= {"num_key_value_heads": 8, "attention_bias": True}
    return family_from_config(config)


@pytest.fixture(scope="module")
def weights(family: ModelFamily) -> Weights:
    return pack_weights(family.tensors(), random_checkpoint(family.tensors(), seed=5))


def forward_and_draft(
    family: ModelFamily, parallel: Parallel, weights: Weights, tokens: Array, positions: Array, kv: Any, draft_kv: Any
) -> tuple[Array, ...]:
    attend = DenseAttend(positions)
    hidden, kv = family.forward(weights, tokens, positions, kv, attend, parallel)
    head, recycled, layer_kv = family.draft_forward(
        weights, 0, tokens, hidden, positions, draft_kv[0], attend, parallel
    )
    logits = family.unembed(weights, parallel.gather_slots(hidden), parallel)
    draft_logits = family.draft_unembed(weights, 0, parallel.gather_slots(head), parallel)
    return hidden, recycled, logits, draft_logits, kv, layer_kv


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_mesh_gives_the_single_device_result(family: ModelFamily, weights: Weights, axes: dict[str, int]) -> None:
    parallel = Parallel(data="data" if "data" in axes else None, model="model" if "model" in axes else None)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    tokens = jax.random.randint(jax.random.key(1), (NUM_SLOTS, WIDTH), 0, family.vocab_size)
    positions = jnp.repeat(positions_of(WIDTH), NUM_SLOTS, axis=0)
    kv = dense_kv(family.kv_specs(), NUM_SLOTS, WIDTH)
    draft_kv = dense_kv(family.draft_kv_specs(), NUM_SLOTS, WIDTH)

    expected = jax.jit(partial(forward_and_draft, family, NO_PARALLEL))(weights, tokens, positions, kv, draft_kv)
    actual = jax.jit(sharded(family, parallel, mesh))(weights, tokens, positions, kv, draft_kv)
    for on_mesh, alone in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(on_mesh, alone, rtol=2e-5, atol=5e-5)


def sharded(family: ModelFamily, parallel: Parallel, mesh: Mesh) -> Any:
    rules = AxisRules(parallel)
    slots, vocab = rules.spec("slots"), rules.spec(None, None, "vocab")
    kv = tuple(rules.spec("slots", None, spec.axis) for spec in family.kv_specs())
    draft_kv = tuple(rules.spec("slots", None, spec.axis) for spec in family.draft_kv_specs())
    return jax.shard_map(
        partial(forward_and_draft, family, parallel),
        mesh=mesh,
        in_specs=(weight_specs(family, rules), slots, slots, kv, draft_kv),
        out_specs=(slots, slots, vocab, vocab, kv, draft_kv[0]),
        check_vma=True,
    )
