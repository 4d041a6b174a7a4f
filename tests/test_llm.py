"""`LLM`: text in and out, stop strings wherever a step ends, and bad requests that fail alone."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.outputs import RequestOutput
from mtp_jax.testing.engines import restart
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.toy_family import ToyFamily
from tests.cli.conftest import save_tokenizer

GOOD_PROMPTS: tuple[Any, ...] = ([3, 1, 4], "ab")
GOOD_PARAMS = (SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=5, max_tokens=12))
NAN = math.nan


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One letter a token, so that a stop string of two letters spans two tokens, and at times two steps."""
    family = ToyFamily()
    return LLM.from_weights(
        family,
        family.init_weights(jax.random.key(0), None),
        tokenizer=save_tokenizer(tmp_path_factory.mktemp("toy")),
        max_num_seqs=3,
        max_model_len=48,
        block_size=4,
        num_kv_blocks=9,
        prefill_chunk=16,
        speculative_config={"num_speculative_tokens": 2},
    )


def generate(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]


def greedy(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    return generate(llm, prompt, temperature=0, max_tokens=20, **params)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "empty"),
        ("", {}, "empty"),
        ([1] * 48, {}, "at most 47"),
        ([1, 29], {}, "token id 29"),
        ([-1], {}, "token id -1"),
        ([1.5], {}, "token id 1.5"),
        (None, {}, "None"),
        ([1] * 20, {"max_tokens": 20}, "the cache has 9"),
        ([1], {"temperature": NAN}, "temperature is nan"),
        ([1], {"temperature": -0.1}, "temperature is -0.1"),
        ([1], {"temperature": math.inf}, "temperature is inf"),
        ([1], {"temperature": 10**400}, "temperature is 1"),
        ([1], {"temperature": 1e-300}, "temperature is 1e-300"),
        ([1], {"temperature": "hot"}, "temperature is 'hot'"),
        ([1], {"top_k": -2}, "top_k is -2"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"top_p": 1e-50}, "top_p is 1e-50"),
        ([1], {"top_p": NAN}, "top_p is nan"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"seed": 2**64}, "2**64 - 1"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"logprobs": 21}, "from 0 to 20"),
        ([1], {"stop": ["a", ""]}, "stop contains ''"),
        ([1], {"stop": ""}, "stop contains ''"),
        ([1], {"stop": 5}, "stop is 5"),
        ([1], {"stop": [5]}, "stop contains 5"),
        ([1], {"stop_token_ids": [29]}, "stop_token_ids contains 29"),
        ([1], {"stop_token_ids": 5}, "stop_token_ids is 5"),
        ([1], {"min_p": 1.5}, "min_p is 1.5"),
        ([1], {"min_tokens": 17}, "min_tokens is 17; it must be an integer from 0 to max_tokens=16"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be None or an integer from 0 to 20"),
        ([1], {"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be a number from -2 to 2"),
        ([1], {"frequency_penalty": -3}, "frequency_penalty is -3"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ([1], {"logit_bias": {29: 2.0}}, "logit_bias contains 29"),
        ([1], {"logit_bias": {1: math.inf}}, "logit_bias[1] is inf"),
        ([1], {"bad_words": ["a" * 17]}, "a word of 17 tokens; at most 16 fit"),
        ([1], {"bad_words": [""]}, "bad_words contains ''; a word must have more than white space"),
        ([1], {"bad_words": ["a\ud800"]}, "lone surrogate"),
        ([1], {"bad_words": [[token] for token in range(29)]}, "would ban all 29 tokens"),
        ([1], {"n": 0}, "n is 0"),
        ([1], {"n": 2, "temperature": 0}, "n is 2 at temperature 0"),
    ],
)
def test_a_bad_request_fails_alone_and_is_told_why(llm: LLM, prompt: Any, params: dict[str, Any], named: str) -> None:
    expected = llm.generate(GOOD_PROMPTS, GOOD_PARAMS, use_tqdm=False)
    # The bad one stands last: a request without a seed derives it from its index.
    outs = llm.generate([*GOOD_PROMPTS, prompt], [*GOOD_PARAMS, SamplingParams(**params)], use_tqdm=False)
    bad = outs[-1].outputs[0]
    assert (bad.finish_reason, bad.token_ids, bad.text) == ("rejected", [], "")
    assert bad.error is not None
    assert named in bad.error
    assert bad.error.endswith(".")
    assert "\n" not in bad.error
    for good, alone in zip(outs[:-1], expected, strict=True):
        assert good.outputs[0] == alone.outputs[0]
        assert good.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        (5, None, "prompts is 5"),
        (b"ab", None, "prompts is"),
        (["ab"], {"temperature": 0}, "sampling_params"),
        (["ab"], [0], "sampling_params"),
        (["ab", "ab"], [SamplingParams()], "2 prompts came with 1"),
    ],
)
def test_a_call_that_is_no_list_of_requests_is_refused(llm: LLM, prompts: Any, params: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        llm.generate(prompts, params, use_tqdm=False)


def test_without_a_seed_a_request_draws_by_its_place_in_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[list[int]]:
        outs = llm.generate([[3, 1, 4]] * 2, SamplingParams(max_tokens=12), use_tqdm=False)
        return [out.outputs[0].token_ids for out in outs]

    first, second = drawn()
    assert first != second
    assert drawn() == [first, second]
    monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, seed=1))
    assert not {*map(tuple, drawn())} & {tuple(first), tuple(second)}


def test_numpy_integers_are_token_ids(llm: LLM) -> None:
    expected = greedy(llm, [1, 2]).outputs[0]
    params = SamplingParams(temperature=0, max_tokens=20)
    for prompts in (np.array([1, 2]), [np.int64(1), np.int64(2)], [np.array([1, 2])], ([1, 2],)):
        (output,) = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        assert output.outputs[0] == expected


@pytest.mark.parametrize("wishes", [(0,), (2,), (2, 0, 1)])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_string_is_found_wherever_tokens_and_steps_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, depth: int, wishes: tuple[int, ...]
) -> None:
    """Every string of one to three letters of the text, so that it starts, ends and lies across every step."""
    whole = greedy(llm, "abc").outputs[0].text
    engine = restart(llm.engine, readback_depth=depth, policy=ScriptedDraftLen(wishes))
    monkeypatch.setattr(llm, "engine", engine)
    stops = [whole[start : start + length] for length in (1, 2, 3) for start in range(len(whole) - length + 1)]
    outs = llm.generate(
        ["abc"] * len(stops),
        [SamplingParams(temperature=0, max_tokens=20, stop=["@@", stop]) for stop in stops],
        use_tqdm=False,
    )
    for stop, output in zip(stops, outs, strict=True):
        completion = output.outputs[0]
        start = whole.index(stop)
        assert completion.text == whole[:start]
        assert len(completion.token_ids) == start + len(stop)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stream_joins_to_the_text_and_never_shows_a_stop(llm: LLM) -> None:
    whole = greedy(llm, "abc").outputs[0].text
    for stop in (None, whole[7:9], whole[10:13]):
        expected = greedy(llm, "abc", stop=stop).outputs[0]
        shown = ""
        for delta in llm.stream("abc", SamplingParams(temperature=0, max_tokens=20, stop=stop)):
            assert delta
            shown += delta
            assert expected.text.startswith(shown)
        assert shown == expected.text


def test_a_closed_stream_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(temperature=0, max_tokens=20))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_free == llm.engine.config.num_pages


def test_a_refused_stream_says_why(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="top_k is -2"):
        next(llm.stream("abc", SamplingParams(top_k=-2)))


def test_text_does_not_depend_on_drafting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for wishes in ((0,), (2,), (1, 2, 0)):
        monkeypatch.setattr(llm, "engine", restart(llm.engine, policy=ScriptedDraftLen(wishes)))
        params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=7, max_tokens=20)
        texts.append([output.outputs[0] for output in llm.generate(["abc", "cab", "b"], params, use_tqdm=False)])
    assert texts[0] == texts[1] == texts[2]


# ---- several samples, log-probabilities of the prompt


def test_samples_are_requests_that_differ_in_their_seeds(llm: LLM) -> None:
    """The first one is what n=1 gives, seeded or not, beside whatever other prompts."""
    for seed in (None, 9):
        params = SamplingParams(seed=seed, max_tokens=12, n=4)
        first, second = llm.generate(["abc", [3, 1]], [params, replace(params, n=2)], use_tqdm=False)
        alone = llm.generate(["abc", [3, 1]], replace(params, n=1), use_tqdm=False)
        assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in first.outputs}) == 4
        assert len(second.outputs) == 2
        for several, single in zip((first, second), alone, strict=True):
            assert several.outputs[0] == single.outputs[0]
            assert several.prompt_token_ids == single.prompt_token_ids
            assert several.prompt == single.prompt


def test_metrics_of_samples_are_their_sums(llm: LLM) -> None:
    ended: list[RequestOutput] = []
    params = SamplingParams(seed=3, max_tokens=12, n=3, stop="e")
    outs = llm.generate(["abc", "b"], params, use_tqdm=False, on_output=ended.append)
    assert sorted(out.request_id for out in ended) == sorted(out.request_id for out in outs)
    for out in outs:
        metrics, num_tokens = out.metrics, sum(len(completion.token_ids) for completion in out.outputs)
        assert metrics.num_steps == len(metrics.draft_lens)
        assert metrics.num_accepted_tokens == sum(metrics.accepted_per_pos)
        # Each sample: one token by its prefill, then the accepted drafts of its steps, and a bonus token where no stop
        # cut it away.
        assert num_tokens <= len(out.outputs) + metrics.num_steps + metrics.num_accepted_tokens
        assert num_tokens >= len(out.outputs) + metrics.num_accepted_tokens


def test_one_sample_is_shown_at_a_time(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="n is 2, and stream shows one sample"):
        next(llm.stream("abc", SamplingParams(n=2)))
    with pytest.raises(ConfigError, match="n is 2, and trace shows one sample"):
        next(llm.trace("abc", SamplingParams(n=2)))


def test_all_samples_of_a_bad_request_say_why(llm: LLM) -> None:
    (out,) = llm.generate([[29]], SamplingParams(n=3), use_tqdm=False)
    assert [completion.finish_reason for completion in out.outputs] == ["rejected"] * 3
    assert {completion.error for completion in out.outputs} == {out.outputs[0].error}
    assert out.prompt_logprobs is None


def test_log_probabilities_of_the_prompt_have_none_for_its_first_token(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=4, prompt_logprobs=2, n=2)
    (out,) = llm.generate(["abcabc"], params, use_tqdm=False)
    assert out.prompt_logprobs is not None
    first, *others = out.prompt_logprobs
    assert first is None
    assert len(others) == 5
    for token, listed in zip(out.prompt_token_ids[1:], others, strict=True):
        assert listed is not None
        assert 2 <= len(listed) <= 3
        assert listed[token].logprob < 0
        assert {1, 2} <= {each.rank for each in listed.values()}
    assert generate(llm, "a", prompt_logprobs=0).prompt_logprobs == [None]
    assert generate(llm, "ab").prompt_logprobs is None


def test_bad_words_and_stop_strings_obey_the_text(llm: LLM) -> None:
    """A word of the text is banned as text; the string that ended it is not looked for before min_tokens."""
    whole = greedy(llm, "abc").outputs[0].text
    without = greedy(llm, "abc", bad_words=[whole[4:6]]).outputs[0].text
    assert whole[4:6] not in without
    stop = whole[2:4]
    assert greedy(llm, "abc", stop=stop).outputs[0].finish_reason == "stop"
    late = greedy(llm, "abc", stop=stop, min_tokens=10).outputs[0]
    assert len(late.token_ids) > 10
    assert late.text.startswith(whole[:10])
