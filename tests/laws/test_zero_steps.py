"""B7, B8: a zero among longer drafts, near the limit and under sampling."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from mtp_jax.core.config import SamplingParams
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.pages import pages_for
from mtp_jax.engine.requests import Request
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.oracle import log_softmax
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import assert_plain, request, toy

HOSTILE = ToyFamily(vocab_size=8, draft_hit_percent=0)


CHAIN = functools.partial(toy_engine, HOSTILE, max_num_seqs=1)
TREE = functools.partial(toy_engine, HOSTILE, max_num_seqs=1, method="dynamic_tree", tree_topk=4, tree_nodes=12)


@pytest.mark.parametrize(("build", "num_rows"), [pytest.param(CHAIN, 4, id="chain"), pytest.param(TREE, 13, id="tree")])
def test_b07_an_explicit_zero_is_kept(build: Callable[[], Engine], num_rows: int) -> None:
    """Near the limit under `group_zero`: one row and one position, although the steps before drafted.

    Near is where the rows of a whole step no longer fit: 4 of a chain, 13 of a tree.
    """
    engine = restart(build(), readback_depth=0, near_limit="group_zero")
    one = request("a", tuple(i % 8 for i in range(34)), temperature=0.0, max_tokens=40)
    run = run_plan(engine, [one])
    assert_plain(engine, [one], run)
    records = run.finished["a"].state.records
    zeros = [record for record in records if record.committed_len_before + num_rows > engine.config.max_model_len]
    assert 0 < len(zeros) < len(records)
    assert all(record.drafts for record in records[: -len(zeros)])
    for record in zeros:
        assert (record.draft_len, record.draft_cap, record.drafts, len(record.target_tokens)) == (0, 0, (), 1)
        assert record.num_pages <= max(records[-len(zeros) - 1].num_pages, pages_for(record.committed_len_after, 4))


@pytest.mark.parametrize("build", [pytest.param(CHAIN, id="chain"), pytest.param(TREE, id="tree")])
def test_b07_an_explicit_zero_reserves_one_position(build: Callable[[], Engine]) -> None:
    """Far from any limit too: pages for the pending token and no more, not for the rows of a whole step."""
    engine = restart(build(), policy=ScriptedDraftLen((0,)), readback_depth=0)
    one = request("a", (1, 2, 3), temperature=0.0, max_tokens=24)
    records = run_plan(engine, [one]).finished["a"].state.records
    assert len(records) == 23
    for record in records:
        assert record.num_pages == pages_for(record.committed_len_before + 1, 4)


def test_b07_a_tree_shrinks_to_what_fits() -> None:
    """Under `row_cap`: as many nodes as there are positions below the limit, down to one row for the last token."""
    engine = restart(TREE(), readback_depth=0)
    one = request("a", (1, 2, 3), temperature=0.0, max_tokens=28)
    run = run_plan(engine, [one])
    assert_plain(engine, [one], run)
    state = run.finished["a"].state
    for record in state.records:
        room = state.limit - record.committed_len_before
        assert len(record.drafts) == record.draft_cap == min(12, room - 1)
        assert len(record.target_tokens) == len(record.drafts) + 1
    assert len(state.records[0].drafts) == 12
    last = request("b", (1, 2, 3), temperature=0.0, max_tokens=2)
    (record,) = run_plan(restart(engine), [last]).finished["b"].state.records
    assert (record.drafts, record.parents, len(record.target_tokens), record.num_pages) == ((), (), 1, 1)


@pytest.mark.parametrize("wishes", [(3, 0, 3, 3), (3, 0, 0, 3, 3), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("build", [pytest.param(CHAIN, id="match"), pytest.param(TREE, id="match, trees")])
def test_b08_zero_and_back_keeps_the_law(build: Callable[[], Engine], wishes: tuple[int, ...]) -> None:
    """A drafter that is always wrong, temperature 1: how surprising the tokens are is what the target's law says.

    Of rejection sampling, whose tokens are not plain decoding's: `test_rejection_engine`.
    """
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
