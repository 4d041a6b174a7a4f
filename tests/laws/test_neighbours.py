"""Law: a request's tokens depend on nobody else in the batch, not on its slot, and not on how many slots there are."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import FinishReason
from mtp_jax.engine.decisions import LaunchDecision, StepDecision
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.readback import Launch
from mtp_jax.engine.requests import Cut, Request
from mtp_jax.testing.driving import Action, Event, Plan, run_plan
from mtp_jax.testing.engines import poison, restart, toy_engine
from mtp_jax.testing.strategies import batches, requests
from tests.laws.support import THREE_SLOTS, assert_plain, plain, request

ONE_SLOT = functools.partial(toy_engine, max_draft_len=1, max_num_seqs=1)
EIGHT_SLOTS = functools.partial(toy_engine, max_draft_len=1, max_num_seqs=8)


@pytest.mark.parametrize("build", [ONE_SLOT, THREE_SLOTS, EIGHT_SLOTS], ids=["1", "3", "8"])
def test_b20_padding_rows_are_inert(build: Callable[[], Engine]) -> None:
    """The same request alone in an engine of 1, 3 and 8 slots, among NaN: only the null page sees the padding."""
    engine = build()
    one = request("a", (8, 1, 8), temperature=1.3, seed=11, top_k=9, max_tokens=30)
    running = restart(engine)
    poison(running)
    assert_plain(running, [one], run_plan(running, [one]))


def test_b20_padding_rows_write_the_null_page_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 1 empty between two busy ones, slot 2 at times: pages that nobody ever held stay NaN."""
    engine = restart(THREE_SLOTS())
    poison(engine)
    ever_held: set[int] = set()
    take = engine.scheduler.pool.take

    def noting_take(count: int) -> list[int]:
        pages = take(count)
        ever_held.update(pages)
        return pages

    monkeypatch.setattr(engine.scheduler.pool, "take", noting_take)
    batch = [request(str(i), (i + 1, 5, 9), temperature=0.0, max_tokens=(24, 2, 12)[i]) for i in range(3)]
    assert_plain(engine, batch, run_plan(engine, batch))
    state = engine.launcher._state
    for layer_kv in (*state.kv, *state.draft_kv):
        k_pages = np.asarray(layer_kv.k_pages)
        written = {page for page in range(1, len(k_pages)) if not np.isnan(k_pages[page]).all()}
        assert written <= ever_held
        assert len(ever_held) < engine.config.num_pages


@given(batch=batches(29, max_model_len=48, min_size=3, max_size=3), order=st.permutations(range(3)))
def test_slots_may_be_permuted(batch: tuple[Request, ...], order: list[int]) -> None:
    """Arrival order decides the slot; the tokens stay."""
    engine = restart(THREE_SLOTS())
    permuted = [batch[i] for i in order]
    assert_plain(engine, permuted, run_plan(engine, permuted))


@given(
    one=requests(29, max_model_len=48, request_id="kept"),
    others=batches(29, max_model_len=48, max_size=4),
    cancelled_at=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    preempted_at=st.none() | st.integers(0, 12),
)
def test_cancelled_neighbours_leave_no_trace(
    one: Request, others: tuple[Request, ...], cancelled_at: list[int], preempted_at: int | None
) -> None:
    engine = restart(THREE_SLOTS())
    poison(engine)
    batch = [one, *others]
    events = [Event(step, Action.CANCEL, index) for index, step in enumerate(cancelled_at, start=1)]
    if preempted_at is not None:
        events.append(Event(preempted_at, Action.PREEMPT, 0))
    run = run_plan(engine, batch, Plan(events=tuple(events)))
    assert "kept" in run.finished
    assert_plain(engine, batch, run)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b15_greedy_and_sampled_rows_share_a_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch, one program: rows at temperature 0 and above do not split it, and do not colour each other."""
    engine = restart(THREE_SLOTS(), readback_depth=depth)
    launched: list[LaunchDecision] = []
    launch = engine.launcher.launch

    def recording_launch(decision: LaunchDecision, inputs: jax.Array) -> Launch:
        launched.append(decision)
        return launch(decision, inputs)

    monkeypatch.setattr(engine.launcher, "launch", recording_launch)
    batch = [
        request(str(i), (4, 4), temperature=temperature, seed=i, max_tokens=20)
        for i, temperature in enumerate((0.0, 1.0, 2.0))
    ]
    assert_plain(engine, batch, run_plan(engine, batch))
    parts = [launch.shards[0] for launch in launched]
    assert sum(isinstance(part, StepDecision) and len(part.slots) == 3 for part in parts) >= 3


def test_bug_b11_greedy_rows_keep_the_argmax_in_any_company() -> None:
    engine = restart(THREE_SLOTS())
    alone = request("0", (5, 6, 7), temperature=0.0, max_tokens=20)
    for temperature, top_k in itertools.product((0.7, 1.0, 2.0), (0, 3)):
        hot = [request(str(i), (5, 6, 7), temperature=temperature, top_k=top_k, seed=i, max_tokens=20) for i in (1, 2)]
        run = run_plan(restart(THREE_SLOTS()), [alone, *hot])
        assert_plain(engine, [alone, *hot], run)


def test_bug_b04_a_seed_gives_the_same_tokens_twenty_times() -> None:
    texts = set()
    for attempt in range(20):
        company = [
            request(str(i), (i, attempt), temperature=1.0, seed=attempt, max_tokens=9) for i in range(attempt % 3)
        ]
        seeded = request("seeded", (2, 4, 6), temperature=2.0, seed=42, max_tokens=10)
        engine = restart(THREE_SLOTS())
        texts.add(tuple(run_plan(engine, [*company, seeded]).finished["seeded"].state.tokens))
    assert len(texts) == 1


def test_bug_b14_sampling_is_not_greedy_in_disguise() -> None:
    engine = restart(THREE_SLOTS())
    batch = [request(str(seed), (3,), temperature=1.0, seed=seed, max_tokens=1) for seed in range(200)]
    drawn = {tuple(last.state.tokens) for last in run_plan(engine, batch).finished.values()}
    assert len(drawn) > 5


class CutsAfter:
    """A watcher that ends its request after `count` tokens, wherever in a step that is."""

    def __init__(self, count: int) -> None:
        self.left = count

    def feed(self, tokens: Sequence[int]) -> Cut | None:
        self.left -= len(tokens)
        return Cut(len(tokens) + self.left, "the end") if self.left <= 0 else None


@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=4), depth=st.integers(0, 2))
def test_a_watcher_cuts_its_own_request(counts: list[int], depth: int) -> None:
    engine = restart(THREE_SLOTS(), readback_depth=depth)
    whole = [request(str(i), (i, 3), temperature=0.0, max_tokens=20) for i in range(len(counts))]
    watched = [replace(one, watcher=CutsAfter(count)) for one, count in zip(whole, counts, strict=True)]
    run = run_plan(engine, watched)
    for one, count in zip(whole, counts, strict=True):
        last = run.finished[one.request_id]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "the end")
        assert tuple(last.state.tokens) == plain(engine, one).tokens[:count]


def test_an_exception_in_one_request_leaves_the_others_right() -> None:
    """A caller's watcher that raises, at its first token and later: its own request ends, with a sentence."""

    class Raises(CutsAfter):
        def feed(self, tokens: Sequence[int]) -> Cut | None:
            if super().feed(tokens) is not None:
                raise ZeroDivisionError("no text")
            return None

    for count, depth in itertools.product((1, 2, 5), range(3)):
        engine = restart(THREE_SLOTS(), readback_depth=depth)
        batch = [request(str(i), (i, 9), temperature=0.0, max_tokens=18) for i in range(4)]
        batch[1] = replace(batch[1], watcher=Raises(count))
        run = run_plan(engine, batch)
        failed = run.finished["1"]
        assert failed.finish_reason is FinishReason.REJECTED
        assert failed.error == "The request's watcher raised ZeroDivisionError('no text')."
        assert len(failed.state.tokens) < count
        others = [batch[0], *batch[2:]]
        assert_plain(engine, others, run)
