"""B7, B8: a zero among longer drafts, near the limit and under sampling.

Shown for what there is. Trees wait, strictly: the same checks run on them once they exist.
"""

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
import pytest

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.pages import pages_for
from mtp_jax.engine.requests import Request
from mtp_jax.options import engine_config
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart, toy_engine, without_optimizations
from mtp_jax.testing.oracle import log_softmax
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import assert_plain, request, toy

HOSTILE = ToyFamily(vocab_size=8, draft_hit_percent=0)


def engine_with(**speculative: object) -> Engine:
    options = {"num_speculative_tokens": 3, **speculative}
    config = engine_config(HOSTILE, options, max_model_len=48, max_num_seqs=1, block_size=4, prefill_chunk=16)
    return without_optimizations(lambda: Engine(HOSTILE, HOSTILE.init_weights(jax.random.key(0), None), config))


CHAIN = functools.partial(toy_engine, HOSTILE, max_num_seqs=1)
TREE = functools.partial(engine_with, method="dynamic_tree", tree_topk=4, tree_nodes=12)
REJECTION = functools.partial(toy_engine, HOSTILE, max_num_seqs=1, acceptance="rejection")


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(CHAIN, id="chain"),
        pytest.param(
            TREE,
            id="tree",
            marks=pytest.mark.xfail(strict=True, raises=ConfigError, reason="there are no draft trees yet"),
        ),
    ],
)
def test_b07_an_explicit_zero_is_kept(build: Callable[[], Engine]) -> None:
    """Near the limit under `group_zero`: one row and one position, although the steps before drafted."""
    engine = restart(build(), readback_depth=0, near_limit="group_zero")
    one = request("a", tuple(i % 8 for i in range(34)), temperature=0.0, max_tokens=40)
    run = run_plan(engine, [one])
    assert_plain(engine, [one], run)
    records = run.finished["a"].state.records
    zeros = [record for record in records if record.committed_len_before + 4 > engine.config.max_model_len]
    assert 0 < len(zeros) < len(records)
    assert all(record.drafts for record in records[: -len(zeros)])
    for record in zeros:
        assert (record.draft_len, record.draft_cap, record.drafts, len(record.target_tokens)) == (0, 0, (), 1)
        assert record.num_pages <= max(records[-len(zeros) - 1].num_pages, pages_for(record.committed_len_after, 4))


@pytest.mark.parametrize("wishes", [(3, 0, 3, 3), (3, 0, 0, 3, 3), (2, 3, 1)], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(CHAIN, id="match"),
        pytest.param(REJECTION, id="rejection"),
    ],
)
def test_b08_zero_and_back_keeps_the_law(build: Callable[[], Engine], wishes: tuple[int, ...]) -> None:
    """A drafter that is always wrong, temperature 1: how surprising the tokens are is what the target's law says."""
    engine = build()
    texts = [text_of(engine, wishes, seed) for seed in range(300)]
    assert abs(surprise(toy(engine), texts, temperature=1.0)) < 4
    assert abs(surprise(toy(engine), texts, temperature=1.25)) > 8  # a law that is somewhat flatter is told apart


def text_of(engine: Engine, wishes: tuple[int, ...], seed: int) -> list[int]:
    params = SamplingParams(temperature=1.0, max_tokens=10)
    running = restart(engine, policy=ScriptedDraftLen(wishes), readback_depth=seed % 2)
    done = run_plan(running, [Request("a", (1, seed % 8), params, seed=seed)]).finished["a"]
    assert len(done.state.tokens) == 10
    return [1, seed % 8, *done.state.tokens]


def surprise(family: ToyFamily, texts: list[list[int]], *, temperature: float) -> float:
    """Sum of -log p of every token less its expectation, in standard deviations: near normal if that is the law."""
    total = variance = 0.0
    for text in texts:
        for length in range(2, len(text)):
            logprobs_V = log_softmax(family.plain_logits(text[:length]) / np.float32(temperature))
            probs_V = np.exp(logprobs_V)
            mean = float(-(probs_V * logprobs_V).sum())
            total += -float(logprobs_V[text[length]]) - mean
            variance += float((probs_V * logprobs_V**2).sum()) - mean**2
    return total / math.sqrt(variance)
