"""Routing and expert products against loops; the three ways to compute the products agree; rows stay apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.experts import MAX_TOKENS_THROUGH_ALL, expert_by_expert, expert_products, grouped, through_all
from mtp_jax.models.moe import MoeConfig, route

D, F, X, K = 6, 4, 5, 2
WAYS = (expert_by_expert, through_all, grouped)
Way = Callable[[Array, Array, Array, Array, Array], Array]


def moe_config(**changes: Any) -> MoeConfig:
    fields = {
        "num_experts": 8,
        "num_active": 2,
        "expert_ffn_size": 4,
        "num_shared": 0,
        "num_groups": 4,
        "num_active_groups": 2,
        "scoring": "sigmoid",
        "normalise": False,
        "scale": 1.0,
    }
    return MoeConfig(**(fields | changes))


def expert_inputs(num_tokens: int, dtype: Any = jnp.float32) -> tuple[Array, Array, Array, Array, Array]:
    keys = jax.random.split(jax.random.key(num_tokens), 5)
    ids = jnp.argsort(jax.random.uniform(keys[1], (num_tokens, X)), axis=1)[:, :K]
    return (
        jax.random.normal(keys[0], (num_tokens, D), dtype),
        ids,
        jax.random.uniform(keys[2], (num_tokens, K)),
        jax.random.normal(keys[3], (X, D, 2, F), dtype),
        jax.random.normal(keys[4], (X, F, D), dtype),
    )


def by_loops(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> np.ndarray:
    x, ids, weights, gate_up, down = (np.asarray(array, np.float64) for array in (x, ids, weights, gate_up, down))
    out = np.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].astype(int), weights[token], strict=True):
            if 0 <= expert < len(down):
                gate, up = x[token] @ gate_up[expert, :, 0], x[token] @ gate_up[expert, :, 1]
                out[token] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_each_way_equals_the_loops(way: Way, num_tokens: int) -> None:
    inputs = expert_inputs(num_tokens)
    np.testing.assert_allclose(way(*inputs), by_loops(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_experts_of_other_shards_add_nothing(way: Way) -> None:
    x, ids, weights, gate_up, down = expert_inputs(9)
    local = (x, ids - 2, weights, gate_up[2:4], down[2:4])
    np.testing.assert_allclose(way(*local), by_loops(*local), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_token_stays_alone(way: Way) -> None:
    x, *rest = expert_inputs(9)
    clean, dirty = way(x, *rest), way(x.at[4].set(jnp.nan), *rest)
    others = np.delete(np.arange(9), 4)
    np.testing.assert_allclose(dirty[others], clean[others], rtol=1e-6)
    assert jnp.isnan(dirty[4]).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_token_does_not_depend_on_its_neighbours(way: Way) -> None:
    x, ids, weights, gate_up, down = expert_inputs(9)
    whole = way(x, ids, weights, gate_up, down)
    alone = way(x[3:4], ids[3:4], weights[3:4], gate_up, down)
    np.testing.assert_allclose(alone[0], whole[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_stays_bfloat16(way: Way) -> None:
    inputs = expert_inputs(5, jnp.bfloat16)
    out = way(*inputs)
    assert out.dtype == jnp.bfloat16
    expected = by_loops(*inputs)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("num_tokens", [4, MAX_TOKENS_THROUGH_ALL + 1])
def test_the_chosen_way_can_be_differentiated(num_tokens: int) -> None:
    x, ids, weights, gate_up, down = expert_inputs(num_tokens)

    def total(way: Way) -> Any:
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(way(args[0], ids, *args[1:]))), argnums=(0, 1, 2, 3)))

    arguments = (x, weights, gate_up, down)
    for chosen, expected in zip(total(expert_products)(*arguments), total(through_all)(*arguments), strict=True):
        np.testing.assert_allclose(chosen, expected, rtol=1e-4, atol=1e-4)


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    logits = jnp.array([[0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    bias = jnp.zeros(8).at[4].set(5.0)
    ids, weights = route(logits, bias, moe_config(num_groups=1, num_active_groups=1))
    assert ids.tolist() == [[4, 3]]
    np.testing.assert_allclose(weights, jax.nn.sigmoid(jnp.array([[0.0, 3.0]])), rtol=1e-6)


def test_groups_compete_by_their_two_best() -> None:
    scores = jnp.array([[0.9, 0.1, 0.6, 0.6, 0.2, 0.2, 0.5, 0.4]])
    config = moe_config(num_active_groups=1, normalise=True, scale=2.0)
    ids, weights = route(jnp.log(scores / (1 - scores)), jnp.zeros(8), config)
    assert sorted(ids[0].tolist()) == [2, 3]
    np.testing.assert_allclose(weights.sum(), 2.0, rtol=1e-6)


def test_a_negative_bias_never_opens_a_closed_group() -> None:
    ids, _ = route(jnp.zeros((1, 8)), jnp.full(8, -3.0).at[:2].set(-2.0), moe_config(num_active_groups=1))
    assert sorted(ids[0].tolist()) == [0, 1]


def test_softmax_scores() -> None:
    logits = jnp.array([[0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    config = moe_config(num_groups=1, num_active_groups=1, scoring="softmax")
    _, weights = route(logits, jnp.zeros(8), config)
    np.testing.assert_allclose(weights[0], jax.nn.softmax(logits[0])[jnp.array([3, 2])], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_groups": 3}, "n_group"),
        ({"num_active_groups": 5}, "topk_group"),
        ({"num_active": 5, "num_active_groups": 2}, "num_experts_per_tok"),
    ],
)
def test_impossible_routing_is_refused(changes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        moe_config(**changes)
