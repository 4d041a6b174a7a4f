"""Bad requests end alone, with a sentence; those beside them are served as if they had not been there."""

from typing import Any

import pytest

from mtp_jax.core.config import CacheConfig, EngineConfig, FinishReason, MeshConfig, SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.admission import problem_with
from mtp_jax.engine.requests import Request
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart
from tests.core.test_config import FIELDS, REFUSED
from tests.laws.support import THREE_SLOTS, assert_plain, request

LONGEST = 47  # max_model_len 48, and one output token

BAD_PROMPTS: list[tuple[str, tuple[Any, ...], str]] = [
    ("empty", (), "The prompt is empty; it needs at least one token."),
    ("too long", (1,) * 48, f"The prompt has 48 tokens; with max_model_len=48 at most {LONGEST} leave room"),
    ("id too large", (1, 29), "The prompt contains token id 29; ids are integers from 0 to 28."),
    ("id negative", (-1, 2), "The prompt contains token id -1"),
    ("id a float", (1, 2.0), "The prompt contains token id 2.0"),
    ("id a truth value", (True, 2), "The prompt contains token id True"),
    ("id a string", ("1",), "The prompt contains token id '1'"),
]


def served_beside(bad: Request, **options: Any) -> Any:
    """What becomes of a bad request between two good ones, which must not notice it."""
    engine = restart(THREE_SLOTS(), **options)
    good = [request("before", (3, 1), temperature=0.0, max_tokens=6), request("after", (4, 1), max_tokens=5)]
    run = run_plan(engine, [good[0], bad, good[1]])
    assert_plain(engine, good, run)
    assert not engine.has_work
    last = run.finished[bad.request_id]
    assert last.finish_reason is FinishReason.REJECTED
    assert last.new_tokens == ()
    assert last.error is not None
    return last


@pytest.mark.parametrize(
    ("prompt", "sentence"), [case[1:] for case in BAD_PROMPTS], ids=[case[0] for case in BAD_PROMPTS]
)
def test_a_bad_prompt_is_rejected_alone(prompt: tuple[Any, ...], sentence: str) -> None:
    last = served_beside(Request("bad", prompt, SamplingParams(temperature=0.0), seed=0))
    assert last.error.startswith(sentence)


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_parameter_is_rejected_alone(name: str) -> None:
    for value in REFUSED[name]:
        params = SamplingParams(**{name: value})
        last = served_beside(Request("bad", (1, 2), params, seed=0))
        assert name in last.error


def banning(words: list[tuple[int, ...]], **params: Any) -> str | None:
    """What is said of bad words over a vocabulary of four."""
    one = request("a", (0,), bad_words=words, **params)
    return problem_with(one, EngineConfig(max_model_len=16), vocab_size=4)


def test_bad_words_are_refused_where_they_leave_nothing_to_write() -> None:
    """At once, after a beginning that they share, and after one that is the end of another; with stops while early."""
    everything = "bad_words and min_tokens would ban all 4 tokens of the vocabulary"
    assert banning([(0,), (1,), (2,), (3,)]) == f"{everything}; leave one."
    assert banning([(2, 0), (2, 1), (2, 2), (2, 3)]) == f"{everything} after [2]; leave one."
    assert banning([(0,), (2, 1), (1, 2, 2), (1, 2, 3)]) == f"{everything} after [1, 2]; leave one."
    assert banning([(0,), (2, 1), (2, 2)], stop_token_ids=(3,), min_tokens=2) == f"{everything} after [2]; leave one."


def test_bad_words_that_no_text_completes_together_are_served() -> None:
    """Every token is the last one of some word, and after every text one is left."""
    assert banning([(0, 0), (1, 1), (2, 2), (3, 3)]) is None
    assert banning([(0,), (1,), (2, 2), (1, 2, 3)]) is None
    assert banning([(0,), (2, 1), (2, 2)], stop_token_ids=(3,), min_tokens=1) is None  # one is written: stops are free


def test_a_request_that_the_pool_can_never_hold_is_rejected_alone() -> None:
    bad = request("bad", (1,) * 10, temperature=0.0, max_tokens=30)
    last = served_beside(bad, num_pages=9)
    assert last.error == (
        "The request needs 10 KV blocks of 4 tokens for its 40 tokens; the cache has 9. "
        "Lower max_tokens or raise num_kv_blocks."
    )


def test_on_a_mesh_a_request_must_fit_the_pages_of_one_data_shard() -> None:
    config = EngineConfig(
        max_model_len=48, max_num_seqs=2, mesh=MeshConfig(data=2), cache=CacheConfig(page_size=4, num_pages=20)
    )
    fits, too_long = (request("a", (1,) * 10, max_tokens=max_tokens) for max_tokens in (31, 32))
    assert problem_with(fits, config, vocab_size=29) is None
    assert problem_with(too_long, config, vocab_size=29) == (
        "The request needs 11 KV blocks of 4 tokens for its 42 tokens; the cache of a data shard has 10. "
        "Lower max_tokens or raise num_kv_blocks."
    )


def test_the_largest_request_that_the_pool_can_hold_is_served() -> None:
    """39 positions in ten pages of four: its last token needs no KV."""
    engine = restart(THREE_SLOTS(), num_pages=10)
    largest = request("largest", (1,) * 10, temperature=0.0, max_tokens=31)
    run = run_plan(engine, [largest])
    assert_plain(engine, [largest], run)


def test_more_tokens_than_the_model_has_room_for_end_by_length() -> None:
    engine = restart(THREE_SLOTS())
    one = request("a", (2,) * LONGEST, temperature=0.0, max_tokens=10**9)
    last = run_plan(engine, [one]).finished["a"]
    assert (len(last.state.tokens), last.finish_reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_bug_b29_the_smallest_budgets(max_tokens: int) -> None:
    """None is refused, one is one, two are two; with and without drafts."""
    one = request("a", (2, 3), temperature=0.0, max_tokens=max_tokens)
    for depth in range(3):
        last = run_plan(restart(THREE_SLOTS(), readback_depth=depth), [one]).finished["a"]
        assert len(last.state.tokens) == max_tokens
        assert last.finish_reason is (FinishReason.LENGTH if max_tokens else FinishReason.REJECTED)


def test_stop_ids_and_ends_of_text_share_the_room_for_stops() -> None:
    """Four fit; two of them are the model's own, whether or not they are ignored."""
    fits = request("fits", (1,), temperature=0.0, max_tokens=3, eos=(7, 8), stop_token_ids=(9, 10))
    engine = restart(THREE_SLOTS())
    assert_plain(engine, [fits], run_plan(engine, [fits]))
    last = served_beside(request("bad", (1,), temperature=0.0, eos=(7, 8), stop_token_ids=(9, 10, 11)))
    assert last.error == "stop_token_ids has 3 entries; at most 2 fit a request."


def test_an_ignored_end_of_text_does_not_end_a_request() -> None:
    engine = restart(THREE_SLOTS())
    plain = run_plan(engine, [request("a", (5, 5), temperature=0.0, max_tokens=12)]).finished["a"].state.tokens
    eos = (plain[3],)
    stopped = request("a", (5, 5), temperature=0.0, max_tokens=12, eos=eos)
    ignoring = request("b", (5, 5), temperature=0.0, max_tokens=12, eos=eos, ignore_eos=True)
    run = run_plan(restart(THREE_SLOTS()), [stopped, ignoring])
    assert run.finished["a"].state.tokens == plain[: plain.index(eos[0]) + 1]
    assert run.finished["b"].state.tokens == plain
    assert run.finished["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("where", ["waiting", "seated", "refused"])
def test_an_id_is_refused_until_its_request_has_ended(where: str) -> None:
    engine = restart(THREE_SLOTS())
    prompt = () if where == "refused" else (3, 1)
    first = request("a", prompt, temperature=0.0, max_tokens=6)
    engine.submit(first)
    if where == "seated":
        engine.step()
    with pytest.raises(ConfigError, match=r"^request id 'a' belongs to a request that has not ended"):
        engine.submit(request("a", (4, 1), temperature=0.0, max_tokens=2))
    last = [progress for progress in engine.run() if progress.finish_reason is not None]
    assert [progress.request_id for progress in last] == ["a"]
    again = request("a", (4, 1), temperature=0.0, max_tokens=5)
    assert_plain(engine, [again], run_plan(engine, [again]))


@pytest.mark.parametrize("num_steps", [0, 2])
def test_the_id_of_a_cancelled_request_is_free_at_once(num_steps: int) -> None:
    engine = restart(THREE_SLOTS())
    engine.submit(request("a", (3, 1), temperature=0.0, max_tokens=9))
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    again = request("a", (4, 1), temperature=0.0, max_tokens=5)
    assert_plain(engine, [again], run_plan(engine, [again]))
