"""B4: the vote is one small reduction, and only where steps must be agreed on."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.core.config import MeshConfig
from mtp_jax.core.layout import VoteColumn
from mtp_jax.core.shapes import PrefillShape, Shape, StepShape
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.launch import Launcher
from mtp_jax.ops.placement import Placement
from tests.laws.support import THREE_SLOTS
from tests.laws.test_meshes import engine_on

SHAPES = [*(StepShape(1, draft_len) for draft_len in range(4)), PrefillShape(16)]


def collectives(text: str) -> Counter[str]:
    """StableHLO collectives by name, as traced: before XLA joins any of them."""
    return Counter(re.findall(r'"stablehlo\.(all_reduce|all_gather|all_to_all|reduce_scatter|collective_\w+)"', text))


@functools.cache
def silent(engine: Engine) -> Launcher:
    """The same steps without the vote; nothing is compiled."""
    program = replace(engine.program, is_voting=False)
    batch = BatchBuilder(engine.config, engine.placement)
    weights = engine.family.init_weights(jax.random.key(0), None)
    dtype = jnp.dtype("float32")
    return Launcher(program, weights, engine.config, engine.grid, batch, engine.placement, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_b04_the_vote_is_one_small_reduction_a_step(shape: Shape) -> None:
    engine = engine_on(4, 2)
    with_vote, without = (launcher.lower(shape).as_text() for launcher in (engine.launcher, silent(engine)))
    assert collectives(with_vote) - collectives(without) == {"all_reduce": 1}
    assert not collectives(without) - collectives(with_vote)
    of_votes = rf'"stablehlo\.all_reduce"[^\n]*\n(?:[^\n]*\n)*?[^\n]*tensor<{len(VoteColumn)}xi32>'
    assert re.search(of_votes, with_vote)
    assert not re.search(rf"-> tensor<{len(VoteColumn)}xi32>", without)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_b04_alone_nothing_is_exchanged(shape: Shape) -> None:
    engine = THREE_SLOTS()
    assert not engine.program.is_voting
    assert not collectives(engine.launcher.lower(shape).as_text())


def test_b04_one_process_with_one_data_shard_does_not_vote() -> None:
    assert not Placement.of(MeshConfig(model=8)).is_voting
    assert Placement.of(MeshConfig(data=2)).is_voting
