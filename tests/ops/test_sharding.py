"""B14: a head split over the whole mesh gives each data shard its own rows, and ties to the lowest global id."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array

from mtp_jax.core.config import CacheConfig, EngineConfig, MeshConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.sharding import check_mesh
from mtp_jax.ops.continuations import likeliest_greedy_tokens
from mtp_jax.ops.placement import AxisRules, Placement
from mtp_jax.ops.sampling import greedy_tokens
from mtp_jax.ops.sharding import Parallel, take_embedding
from mtp_jax.testing.toy_family import ToyFamily

V, D, B, W = 16, 6, 8, 2
MESHES = [MeshConfig(data=2), MeshConfig(data=4), MeshConfig(data=2, model=2), MeshConfig(model=4)]


def on_mesh(mesh: MeshConfig, function: Callable[..., Any], *axes: tuple[str | None, ...]) -> Callable[..., Any]:
    placement = Placement.of(mesh)
    specs = tuple(placement.rules.spec(*names) for names in axes)
    return jax.jit(placement.map(lambda *x: function(*x, placement.parallel), specs, placement.rules.spec("slots")))


def head(hidden_BWD: Array, table_VD: Array, parallel: Parallel) -> Array:
    logits_BWV = jnp.einsum("bwd,vd->bwv", parallel.gather_slots(hidden_BWD), table_VD)
    return greedy_tokens(logits_BWV, parallel)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_b14_each_shard_gets_its_own_rows_back(mesh: MeshConfig) -> None:
    hidden = jax.random.normal(jax.random.key(0), (B, W, D))
    table = jax.random.normal(jax.random.key(1), (V, D))
    expected = jnp.argmax(jnp.einsum("bwd,vd->bwv", hidden, table), axis=-1)
    assert len(set(np.asarray(expected).ravel().tolist())) > 4
    tokens = on_mesh(mesh, head, ("slots",), ("vocab",))(hidden, table)
    assert np.array_equal(tokens, expected)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_b14_ties_go_to_the_lowest_global_id_across_devices(mesh: MeshConfig) -> None:
    """Every pair of ids in turn shares the largest score, wherever the two live."""
    pairs = [(low, high) for low in range(V) for high in range(low + 1, V)][: B * W]
    scores = np.zeros((V, B * W), np.float32)
    for row, (low, high) in enumerate(pairs):
        scores[[low, high], row] = 1.0
    one_hot = np.eye(B * W, dtype=np.float32).reshape(B, W, B * W)
    tokens = on_mesh(mesh, head, ("slots",), ("vocab",))(jnp.asarray(one_hot), jnp.asarray(scores))
    assert np.asarray(tokens).ravel().tolist() == [low for low, _ in pairs]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("k", [3, 7])
def test_b14_the_best_of_all_devices_come_in_order_ties_by_the_lowest_global_id(mesh: MeshConfig, k: int) -> None:
    """Scores of a few values: wherever the equal ones live, as if one device had them all; k above its share too."""
    scores = np.random.default_rng(k).integers(0, 4, (B, W, V)).astype(np.float32)

    def best(scores_BWV: Array, parallel: Parallel) -> tuple[Array, Array]:
        own_BWv = parallel.own_vocab(parallel.gather_slots(scores_BWV))
        tokens_BWk, logprobs_BWk = likeliest_greedy_tokens(own_BWv, k, parallel)
        return tokens_BWk, logprobs_BWk

    tokens, logprobs = on_mesh(mesh, best, ("slots",))(jnp.asarray(scores))
    expected = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(tokens, expected)
    whole = jax.nn.log_softmax(scores, axis=-1)
    np.testing.assert_allclose(logprobs, np.take_along_axis(np.asarray(whole), expected, axis=-1), atol=1e-5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_whole_logits_and_embedding_rows_come_home(mesh: MeshConfig) -> None:
    table = jax.random.normal(jax.random.key(2), (V, D))
    tokens = jax.random.randint(jax.random.key(3), (B, W), 0, V)

    def both(tokens_BW: Array, table_VD: Array, parallel: Parallel) -> tuple[Array, Array]:
        rows_BWD = take_embedding(table_VD, tokens_BW, parallel)
        logits_BWV = jnp.einsum("bwd,vd->bwv", parallel.gather_slots(rows_BWD), table_VD)
        return rows_BWD, parallel.whole_logits(logits_BWV)

    rows, logits = on_mesh(mesh, both, ("slots",), ("vocab",))(tokens, table)
    np.testing.assert_allclose(rows, table[tokens], rtol=1e-6)
    np.testing.assert_allclose(logits, jnp.einsum("bwd,vd->bwv", table[tokens], table), rtol=2e-5, atol=2e-5)


def test_two_axes_of_an_array_cannot_share_a_mesh_axis() -> None:
    rules = AxisRules(Parallel(data="data", model="model"))
    assert rules.spec("experts", None) == PartitionSpec(("data", "model"), None)
    with pytest.raises(ConfigError, match="share a mesh axis"):
        rules.spec("experts", "ffn")
    with pytest.raises(ConfigError, match="logical axis"):
        rules.spec("rows")


def test_a_mesh_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 16 devices; there are 8"):
        Placement.of(MeshConfig(data=16))

    class Odd(ToyFamily):
        def tensors(self) -> Any:
            salt, _ = super().tensors()
            return (salt.__class__(("a",), (6, 4), ("heads", "vocab"), (), (), lambda x: x[0], lambda x: (x,)),)

    check_mesh(Odd(vocab_size=8), MeshConfig(model=2))
    with pytest.raises(ConfigError, match=r"toy has 6 attention heads; mesh=.* needs a multiple of 4"):
        check_mesh(Odd(vocab_size=8), MeshConfig(model=4))
    with pytest.raises(ConfigError, match=r"toy has 4 vocabulary entries; mesh=.* needs a multiple of 8"):
        check_mesh(Odd(vocab_size=8), MeshConfig(data=4, model=2))

    class Experts(ToyFamily):
        def tensors(self) -> Any:
            salt, _ = super().tensors()
            return (salt.__class__(("a",), (6, 4), ("experts", None), (), (), lambda x: x[0], lambda x: (x,)),)

    check_mesh(Experts(vocab_size=24), MeshConfig(data=3, model=2))
    with pytest.raises(ConfigError, match=r"toy has 6 experts; mesh=.* needs a multiple of 4"):
        check_mesh(Experts(vocab_size=24), MeshConfig(data=2, model=2))
    with pytest.raises(ConfigError, match=r"toy has 29 vocabulary entries; mesh=.* needs a multiple of 2"):
        check_mesh(ToyFamily(vocab_size=29), MeshConfig(data=2))  # none of its tensors is split


@pytest.mark.parametrize("name", ["max_stop_token_ids", "max_logit_bias", "max_bad_words"])
def test_no_empty_lists_on_a_mesh(name: str) -> None:
    """XLA's partitioner ends the process over some of them (jaxlib 0.10.2 and 0.11.2)."""
    EngineConfig(max_model_len=32, max_num_seqs=4, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} is 0; on a mesh it must be at least 1"):
        EngineConfig(max_model_len=32, max_num_seqs=4, mesh=MeshConfig(data=2), **{name: 0})  # type: ignore[arg-type]


def test_slots_and_pages_must_divide_over_the_data_shards() -> None:
    mesh = MeshConfig(data=2)
    with pytest.raises(ConfigError, match=r"max_num_seqs is 3; it must be a multiple of the mesh's 2 data shards"):
        EngineConfig(max_model_len=32, max_num_seqs=3, mesh=mesh)
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 9; it must be a multiple of the mesh's 2 data shards"):
        EngineConfig(max_model_len=32, max_num_seqs=4, mesh=mesh, cache=CacheConfig(num_pages=9))
