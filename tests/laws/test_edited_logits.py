"""Laws of what edits logits: bad words, min_tokens, bias and penalties act as in plain decoding, whatever drafts."""

from dataclasses import replace

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request
from mtp_jax.testing.driving import Action, Event, Plan, run_plan
from mtp_jax.testing.engines import restart
from mtp_jax.testing.policies import ScriptedDraftLen
from tests.laws.support import LOOKUP, THREE_SLOTS, TREE, assert_plain, plain, request

EDITS = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {3: 2.5, 11: -8.0, 20: 1.5}},
    "min_tokens": {"min_tokens": 14},
}
FIXED = tuple(ScriptedDraftLen((draft_len,)) for draft_len in range(4))


def served(engine: Engine, requests: list[Request], plan: Plan = Plan(), **options: object) -> None:  # noqa: B008
    running = restart(engine, **options)  # type: ignore[arg-type]
    assert_plain(running, requests, run_plan(running, requests, plan))


@pytest.mark.parametrize("name", EDITS)
def test_bug_b17_each_parameter_acts_as_in_plain_decoding(name: str) -> None:
    """Greedy and sampled, at every draft length; and it does act: the text without it is another one."""
    engine = THREE_SLOTS()
    for temperature in (0.0, 1.0):
        stops = (5, 17) if name == "min_tokens" else ()
        without = request("a", (5, 9, 5), temperature=temperature, seed=4, max_tokens=24, stop_token_ids=stops)
        edited = replace(without, request_id="b", params=replace(without.params, **EDITS[name]))
        for policy in (FIXED[0], FIXED[3]):
            served(engine, [without, edited], policy=policy)
        if name != "min_tokens" or len(plain(engine, without).tokens) < 14:
            assert plain(engine, without).tokens != plain(engine, edited).tokens


def test_min_tokens_hold_a_stop_back_and_then_let_it_through() -> None:
    engine = THREE_SLOTS()
    text = plain(engine, request("a", (5, 9, 5), temperature=0.0, max_tokens=24)).tokens
    stop = text[6]
    for min_tokens in (0, text.index(stop), text.index(stop) + 1, 12):
        one = request("a", (5, 9, 5), temperature=0.0, max_tokens=24, stop_token_ids=(stop,), min_tokens=min_tokens)
        served(engine, [one], policy=FIXED[3])
        assert len(plain(engine, one).tokens) > min_tokens or min_tokens == 24
        eos = replace(one, eos_token_ids=(stop,), params=replace(one.params, stop_token_ids=()))
        ignoring = replace(eos, request_id="b", params=replace(eos.params, ignore_eos=True))
        served(engine, [eos, ignoring], policy=FIXED[3])
        assert stop not in plain(engine, ignoring).tokens[:min_tokens]
        assert len(plain(engine, ignoring).tokens) == 24


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bug_b22_bad_words_see_the_drafted_prefix(length: int) -> None:
    """Every word of that length in the text, one at a time: banned at whatever place of a step it would end."""
    engine = THREE_SLOTS()
    free = request("a", (5, 9, 5), temperature=0.0, max_tokens=20)
    text = plain(engine, free).tokens
    words = [text[start : start + length] for start in range(0, len(text) - length + 1, 3)]
    batch = [
        replace(free, request_id=str(index), params=replace(free.params, bad_words=[word]))
        for index, word in enumerate(words)
    ]
    for one, word in zip(batch, words, strict=True):
        banned = plain(engine, one).tokens
        assert not any(banned[start : start + length] == word for start in range(len(banned)))
    served(engine, batch, policy=FIXED[3])


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    """What was written counts, as in vLLM: a word whose beginning the prompt has is not complete by its last token."""
    engine = THREE_SLOTS()
    free = request("a", (5, 9, 5), temperature=0.0, max_tokens=20)
    first = plain(engine, free).tokens[0]
    one = replace(free, params=replace(free.params, bad_words=[(5, first)]))
    served(engine, [one], policy=FIXED[3])
    assert plain(engine, one).tokens[0] == first


def test_bug_b16_a_banned_token_is_never_written_whatever_drafts() -> None:
    """The token that plain text has most often, with a bias that no logit outweighs; drafts do propose it."""
    engine = THREE_SLOTS()
    free = request("a", (5, 9, 5), temperature=1.0, seed=2, max_tokens=24)
    token = max(plain(engine, free).tokens, key=plain(engine, free).tokens.count)
    one = replace(free, params=replace(free.params, logit_bias={token: -100.0}))
    served(engine, [one], policy=FIXED[3])
    assert token not in plain(engine, one).tokens


@pytest.mark.parametrize("draft_len", range(4))
def test_bug_b19_a_penalty_breaks_a_loop_where_plain_decoding_does(draft_len: int) -> None:
    """Prompt lookup copies what the text repeats; the penalty, growing within the step, ends it."""
    engine = LOOKUP()
    loops = request("a", (1, 2, 1, 2, 1, 2), temperature=0.0, max_tokens=24, frequency_penalty=0.5)
    again = request("b", (1, 2, 1, 2, 1, 2), temperature=0.0, max_tokens=24, repetition_penalty=1.25)
    served(engine, [loops, again], policy=FIXED[draft_len])


@pytest.mark.parametrize("depth", [0, 2])
def test_text_and_lists_survive_a_preemption(depth: int) -> None:
    """A resumed request's counts are rebuilt, its prompt ends where it ended, and its slot's lists are its own."""
    engine = THREE_SLOTS()
    params = {
        "temperature": 0.0,
        "max_tokens": 20,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 10,
        "stop_token_ids": (5, 17),
    }
    one = request("a", (5, 9, 5), **params)
    text = plain(engine, one).tokens
    one = replace(one, params=replace(one.params, bad_words=[text[8:10]], logit_bias={text[4]: -1.0}))
    other = request("b", (2, 2), temperature=0.0, max_tokens=20, logit_bias={7: 3.0}, bad_words=[(7, 7), (3,)])
    for step in (2, 4, 6):
        plan = Plan(events=(Event(step, Action.PREEMPT, 0), Event(step + 1, Action.PREEMPT, 1)))
        served(engine, [one, other], plan, readback_depth=depth, policy=FIXED[2])


def test_a_slot_does_not_inherit_lists() -> None:
    """One slot after the other: the second request brought no list, the third a shorter one."""
    engine = LOOKUP()
    batch = [
        request("0", (1, 2), temperature=0.0, max_tokens=6, logit_bias={1: 50.0, 0: 20.0}, bad_words=[(2,), (1, 1)]),
        request("1", (1, 2), temperature=0.0, max_tokens=6),
        request("2", (1, 2), temperature=0.0, max_tokens=6, logit_bias={3: 1.0}, bad_words=[(0, 0)]),
        request("3", (1, 2), temperature=0.0, max_tokens=6, presence_penalty=1.0),
    ]
    served(engine, batch, Plan(arrivals=(0, 12, 24, 36)))
    served(engine, [*batch, *(replace(one, request_id=f"again {one.request_id}") for one in batch)])


def test_trees_are_edited_along_their_own_paths() -> None:
    engine = TREE()
    text = plain(engine, request("a", (5, 9, 5), temperature=0.0, max_tokens=20)).tokens
    params = {"max_tokens": 20, "bad_words": [text[3:5], text[6:8]], "frequency_penalty": 0.5}
    served(engine, [request(str(t), (5, 9, 5), temperature=t, **params) for t in (0.0, 1.0)])
