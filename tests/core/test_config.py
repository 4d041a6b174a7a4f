"""What a configuration refuses at start, and what a request is told: one sentence that names the thing."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.layout import ListSizes
from mtp_jax.core.sampling_params import FLOAT32_RANGE, RequestLimits

LIMITS = RequestLimits(vocab_size=29, max_logprobs=3, max_stop_token_ids=4, lists=ListSizes(300, 64, 16))

REFUSED: dict[str, list[Any]] = {
    "temperature": [math.nan, math.inf, -0.1, 1e39, 1e-46, "1", None, True],
    "top_k": [-2, 1.5, "3", None, True],
    "top_p": [0, -0.5, 1.01, math.nan, 1e-50, "1", None],
    "min_p": [-0.1, 1.01, math.nan, 1e-50, "0", None, False],
    "seed": [-1, 2**64, 0.5, "0", True],
    "max_tokens": [0, -3, 2.0, "5", True],
    "min_tokens": [-1, 17, 2.0, None, False],
    "stop": ["", ["a", ""], ("a", 3), 7, [None]],
    "stop_token_ids": [[29], [-1], [1.0], [True], "12", 5, [1, 2, 3, 4, 5]],
    "ignore_eos": [1, "yes", None],
    "logprobs": [-1, 4, 1.0, "2", True],
    "prompt_logprobs": [-1, 4, 1.0, "2", True],
    "presence_penalty": [2.1, -2.1, math.nan, "1", None, False],
    "frequency_penalty": [2.1, -2.1, math.nan, "1", None, False],
    "repetition_penalty": [0, -1.0, math.inf, math.nan, 1e-50, "1", None, True],
    "logit_bias": [
        {29: 1.0},
        {-1: 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {3: math.inf},
        {3: math.nan},
        {3: 1e39},
        {3: "1"},
        {3: True},
        [3],
        5,
        dict.fromkeys(range(301), 1.0),
    ],
    "bad_words": [["x"], "x", 5, [[]], [[29]], [[-1]], [[1.0]], [5], [[1] * 17], [[1]] * 65, [[True]]],
    "n": [0, -1, 2.0, None, "2", True, 10**9],
    "thinking_token_ids": [5, "12", (1,), (1, 2, 3), (1, 1), (1, 29), (-1, 2), (1.0, 2), (True, 2), {1, 2}],
}
HONOURED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 2.5, *FLOAT32_RANGE],
    "top_k": [0, -1, 1, 28, 2**40],
    "top_p": [1, 1.0, 0.5, FLOAT32_RANGE[0]],
    "min_p": [0, 0.1, 1, FLOAT32_RANGE[0]],
    "seed": [None, 0, 2**64 - 1],
    "min_tokens": [0, 16],
    "max_tokens": [1, 10**9, None],
    "stop": [None, "a", ["a", "bc"], (), []],
    "stop_token_ids": [None, (), [0], (28, 3), [1, 2, 3, 4]],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 3],
    "prompt_logprobs": [None, 0, 3],
    "presence_penalty": [0, -2, 2.0, 0.5],
    "frequency_penalty": [0, -2, 2.0, 0.5],
    "repetition_penalty": [1, 0.5, 2, *FLOAT32_RANGE],
    "logit_bias": [None, {}, {0: -FLOAT32_RANGE[1], 28: 5}, dict.fromkeys(range(29), -100.0)],
    "bad_words": [None, [], (), [[1, 2], (3,)], [[1] * 16] * 64],
    "n": [1, 2, 16_384],
    "thinking_token_ids": [None, (1, 2), [28, 0]],
}
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("name", FIELDS)
def test_bug_b17_every_sampling_parameter_has_values_that_are_refused(name: str) -> None:
    """A field that is added must be added here: either it is honoured, or it is refused; it is never ignored."""
    for value in REFUSED[name]:
        problem = SamplingParams(**{name: value}).problem(LIMITS)
        assert problem is not None, f"{name}={value!r} was let through"
        assert name in problem
        assert problem.endswith(".")
        assert "\n" not in problem


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_parameter_allows_is_let_through(name: str) -> None:
    default = SamplingParams.__dataclass_fields__[name].default
    for value in [default, *HONOURED.get(name, [])]:
        assert SamplingParams(**{name: value}).problem(LIMITS) is None


SEEN_BY = {
    "mtp_jax/testing/strategies.py": {
        *("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop_token_ids", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    },
    "tests/laws/test_sampling_laws.py": {"seed", "logprobs"},
    "tests/laws/test_prompt_logprobs.py": {"prompt_logprobs"},
    "tests/test_llm.py": {"stop", "n"},
    "tests/engine/test_requests.py": {"ignore_eos"},
    "tests/acceptance/test_relaxed.py": {"thinking_token_ids"},
}


def test_each_parameter_is_seen_by_a_law() -> None:
    """One that no strategy draws and no law varies could be ignored unnoticed."""
    assert set.union(*SEEN_BY.values()) == set(FIELDS)
    root = Path(__file__).parents[2]
    for file, names in SEEN_BY.items():
        text = (root / file).read_text()
        assert all(name in text for name in names), file


def test_parameters_that_contradict_each_other_are_refused() -> None:
    assert (
        SamplingParams(min_tokens=5, max_tokens=4).problem(LIMITS)
        == "min_tokens is 5; it must be an integer from 0 to max_tokens=4."
    )
    assert (
        SamplingParams(min_tokens=-5, max_tokens=None).problem(LIMITS)
        == "min_tokens is -5; it must be an integer from 0 on."
    )
    assert "n is 2 at temperature 0" in (SamplingParams(n=2, temperature=0).problem(LIMITS) or "")


def test_a_parameter_edits_logits_or_does_not() -> None:
    """A batch of none that do takes the quick way; a field missing here would send it there."""
    edits = {
        "min_tokens": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
        "bad_words": [[3]],
    }
    for name in FIELDS:
        value = edits.get(name, HONOURED.get(name, [None])[-1])
        assert SamplingParams(**{name: value}).edits_logits == (name in edits), name
    assert not SamplingParams(logit_bias={}, bad_words=()).edits_logits


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"method": 3}, "method is 3; it must be a name or None."),
        ({"policy": None}, "policy is None; it must be a name."),
        ({"near_limit": "none"}, "near_limit"),
        ({"acceptance": ["match"]}, "acceptance"),
        ({"draft_sampling": "random"}, "draft_sampling"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be an integer from 0 to 7"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens"),
        (
            {"acceptance": "rejection", "draft_sampling": "coupled"},
            "'coupled', and acceptance='rejection' takes 'probabilistic' or 'greedy'",
        ),
        (
            {"draft_sampling": "probabilistic"},
            "'probabilistic', and acceptance='match' takes 'coupled' or 'greedy'",
        ),
        ({"block_verification": True}, "block_verification goes with"),
        ({"acceptance": "rejection", "block_verification": 1}, "block_verification is 1; it must be True or False"),
        ({"relaxed_delta": 0.0}, "relaxed_delta goes with acceptance=\"relaxed\", not 'match'"),
        ({"relaxed_topk": 3}, "relaxed_topk goes with acceptance=\"relaxed\", not 'match'"),
        ({"relaxed_delta": 0.6, "acceptance": "rejection"}, 'relaxed_delta goes with acceptance="relaxed"'),
        ({"relaxed_topk": 0, "acceptance": "relaxed"}, "relaxed_topk is 0; it must be an integer at least 1"),
        ({"relaxed_delta": 1.5, "acceptance": "relaxed"}, "relaxed_delta is 1.5; it must be a number from 0 to 1"),
        ({"acceptance": "relaxed", "synthetic_acceptance": [1, 1, 1]}, 'acceptance="relaxed" does nothing under'),
        ({"synthetic_acceptance": 0.5}, "synthetic_acceptance is 0.5; it must be a list of numbers"),
        ({"synthetic_acceptance": [0.5, 0.5, 1.5]}, "synthetic_acceptance is .*; it must be a list of numbers"),
        ({"synthetic_acceptance": [0.5]}, "synthetic_acceptance has 1 entries; num_speculative_tokens=3 needs as many"),
        ({"synthetic_acceptance": [0.5, 0.6, 0.1]}, "no entry may be above the one before"),
        (
            {"synthetic_acceptance": [1, 1, 1], "acceptance": "rejection", "block_verification": True},
            "block_verification does nothing",
        ),
        ({"policy": "schedule"}, "draft_len_schedule"),
        ({"disable_below_acceptance": 0.0}, "disable_below_acceptance is 0.0; it must be None or a number above 0"),
        ({"disable_below_acceptance": 1.5}, "disable_below_acceptance is 1.5"),
        ({"disable_below_acceptance": float("nan")}, "disable_below_acceptance is nan"),
        ({"disable_below_acceptance": True}, "disable_below_acceptance is True"),
        ({"disable_below_acceptance": 0.5, "acceptance_window": 0}, "acceptance_window is 0"),
        ({"acceptance_window": 16}, "acceptance_window is 16, and nothing looks at it"),
        ({"draft_len_schedule": {1: 3}}, "draft_len_schedule"),
        ({"policy": "schedule", "draft_len_schedule": {}}, "empty"),
        ({"policy": "schedule", "draft_len_schedule": {4: 2}}, "the first entry must give num_speculative_tokens=3"),
        ({"policy": "schedule", "draft_len_schedule": {2: 3, 4: 5}}, r"draft_len_schedule\[4\] is 5"),
        ({"policy": "schedule", "draft_len_schedule": {0: 3}}, "batch size"),
    ],
)
def test_a_speculative_configuration_is_checked_at_start(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig(**fields)


def test_draft_sampling_follows_the_acceptance_rule_unless_given() -> None:
    rejection = SpeculativeConfig(acceptance="rejection")
    assert (SpeculativeConfig().draft_sampling, rejection.draft_sampling) == ("coupled", "probabilistic")
    assert dataclasses.replace(rejection, acceptance="match") == SpeculativeConfig()
    greedy = SpeculativeConfig(acceptance="rejection", draft_sampling="greedy")
    assert dataclasses.replace(greedy, acceptance="match").draft_sampling == "greedy"
    with pytest.raises(ConfigError, match="coupled"):
        dataclasses.replace(SpeculativeConfig(draft_sampling="coupled"), acceptance="rejection")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_model_len": 1},
        {"max_model_len": "48"},
        {"max_num_seqs": 0},
        {"prefill_chunk": 0},
        {"readback_depth": 3},
        {"readback_depth": -1},
        {"readback_depth": True},
        {"seed": 2**64},
        {"seed": -1},
        {"max_logprobs": -1},
    ],
)
def test_an_engine_configuration_is_checked_at_start(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{"max_model_len": 48, **fields})


@pytest.mark.parametrize(("fields", "named"), [({"page_size": 0}, "block_size"), ({"num_pages": 0}, "num_kv_blocks")])
def test_the_cache_is_named_as_the_user_knows_it(fields: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CacheConfig(**fields)  # type: ignore[arg-type]


def test_configurations_are_hashable_and_frozen() -> None:
    spec = SpeculativeConfig(policy="schedule", draft_len_schedule={2: 3, 8: 1})
    config = EngineConfig(max_model_len=48, speculative=spec)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.draft_len_schedule[2] = 0  # type: ignore[index]


def test_pages_follow_from_the_lengths() -> None:
    config = EngineConfig(max_model_len=33, max_num_seqs=3, cache=CacheConfig(page_size=16))
    assert (config.pages_per_slot, config.num_pages) == (3, 9)
    assert dataclasses.replace(config, cache=CacheConfig(page_size=16, num_pages=5)).num_pages == 5


def test_plain_decoding_has_no_draft_length() -> None:
    for spec in (SpeculativeConfig(method=None), SpeculativeConfig(method=None, num_speculative_tokens=0)):
        assert spec.num_speculative_tokens == 0
        assert dataclasses.replace(spec) == spec


@pytest.mark.parametrize(
    "fields",
    [
        {"num_speculative_tokens": 3},  # the default, asked for
        {"num_speculative_tokens": 1},
        {"policy": "goodput"},
        {"disable_below_acceptance": 0.5},
        {"policy": "schedule", "draft_len_schedule": {4: 0}},
        {"draft_len_schedule": {4: 3}},
        {"near_limit": "group_zero"},
        {"acceptance": "relaxed"},
        {"draft_sampling": "greedy"},
        {"draft_sampling": "coupled"},
    ],
)
def test_plain_decoding_together_with_a_way_to_draft_is_a_contradiction(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}.*method=None is plain decoding"):
        SpeculativeConfig(method=None, **fields)


def test_fewer_mtp_layers_shorten_all_that_speaks_of_draft_lengths() -> None:
    """A model with two MTP layers, asked for three drafts: what goes beyond is cut, not refused."""
    spec = SpeculativeConfig(policy="schedule", draft_len_schedule={2: 3, 4: 1}, synthetic_acceptance=[0.9, 0.8, 0.7])
    limited = spec.limited_to(2)
    assert limited.num_speculative_tokens == 2
    assert limited.draft_len_schedule == {2: 2, 4: 1}
    assert limited.synthetic_acceptance == (0.9, 0.8)
    assert limited.limited_to(2) == limited


def test_host_modules_do_not_load_jax() -> None:
    """The books run where there is no jax: importing them loads neither it nor numpy."""
    code = (
        "import sys; import mtp_jax.core.config, mtp_jax.engine.scheduler, mtp_jax.policies.registry;"
        "sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
