"""Several readers of one `LLM`: interleaved traces, interrupts, and bad input that reaches nobody else."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.core.errors import ConfigError, EngineFailed
from mtp_jax.engine.interrupts import interrupts_held
from mtp_jax.engine.requests import StepRecord
from mtp_jax.options import engine_config
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.testing.toy_family import ToyFamily

FAMILY = ToyFamily(vocab_size=8)
PARAMS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_weights(
        FAMILY,
        FAMILY.init_weights(jax.random.key(0), None),
        max_num_seqs=2,
        max_model_len=32,
        prefill_chunk=16,
        speculative_config={"num_speculative_tokens": 1},
    )


@pytest.fixture
def _interrupts_raise() -> Iterator[None]:
    """As in a terminal; a shell starts what runs in its background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def emitted(records: list[StepRecord]) -> list[int]:
    return [token for record in records for token in record.emitted]


def plain(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(FAMILY.plain_logits(tokens))))
    return tokens[len(prompt) :]


def test_interleaved_traces_lose_no_record(llm: LLM) -> None:
    """A suspended reader's records go on growing while others step the engine."""
    slow, quick = llm.trace([1, 2, 3], PARAMS), llm.trace([4, 5], PARAMS)
    first = [next(slow)]
    between = list(quick)
    assert emitted([*first, *slow]) == plain([1, 2, 3], 20)[1:]  # prefill gives the first token
    assert emitted(between) == plain([4, 5], 20)[1:]


@pytest.mark.usefixtures("_interrupts_raise")
def test_an_interrupt_in_a_launch_leaves_the_engine_and_its_neighbour_whole(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = llm.trace([1, 2, 3], PARAMS)
    first = [next(neighbour)]

    def interrupted(step: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            result = step(*args)  # the old state is gone, the new one in nobody's hands
            os.kill(os.getpid(), signal.SIGINT)
            return result

        return launch

    steps = llm.engine.launcher._steps
    for shape, step in steps.items():
        monkeypatch.setitem(steps, shape, interrupted(step))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[4, 5]], PARAMS, use_tqdm=False)
    monkeypatch.undo()
    assert emitted([*first, *neighbour]) == plain([1, 2, 3], 20)[1:]
    assert not llm.engine.has_work


@pytest.mark.usefixtures("_interrupts_raise")
def test_a_second_interrupt_goes_through() -> None:
    reached = []

    def block() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after the first")
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after the second")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    "prompt", [{}, {"promt": [1]}, {"prompt_token_ids": None}, "text", 5, [], [True], {1, 2}, "\ud800"]
)
def test_a_trace_of_a_refused_request_raises(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ConfigError):
        next(llm.trace(prompt, PARAMS))


def test_params_of_a_trace_are_checked(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="params is"):
        next(llm.trace([1], {"temperature": 0}))  # type: ignore[arg-type]


def test_a_generator_of_prompts_keeps_its_first_one(llm: LLM) -> None:
    def prompts() -> Iterator[list[int]]:
        yield [1, 2]
        yield [3]

    assert [out.prompt_token_ids for out in llm.generate(prompts(), PARAMS, use_tqdm=False)] == [[1, 2], [3]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": np.ones(2)},
        {"min_p": ""},
        {"repetition_penalty": []},
        {"logprobs": 9},
        {"bad_words": ["a"]},  # this model has no tokenizer
        {"bad_words": 5},
        {"bad_words": [5]},
        {"min_tokens": "3"},
    ],
)
def test_parameters_of_odd_types_are_refused(llm: LLM, params: dict[str, Any]) -> None:
    out = llm.generate([[1]], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    assert out.finish_reason == "rejected"


def test_all_of_a_small_vocabulary_can_be_listed(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=8)
    for step in llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].logprobs or []:
        assert sorted(each.rank for each in step.values()) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert sum(np.exp(each.logprob) for each in step.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": "mtp"},
        {"speculative_config": {"policy": "schedule", "draft_len_schedule": 5}},
        {"mesh": 5},
        {"mesh": "data=2"},
        {"async_scheduling": "False"},
        {"max_model_len": "40"},
    ],
)
def test_options_of_odd_types_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        engine_config(FAMILY, options.pop("speculative_config", None), **options)


def test_a_step_that_fails_on_the_device_keeps_what_had_finished(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short request ends first; then a launch fails. The engine says so from then on, and does not hang."""
    launch, done = llm.engine.launcher.launch, []

    def failing(decision: Any, inputs: Any) -> Any:
        if done:
            raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone\nand more")
        return launch(decision, inputs)

    monkeypatch.setattr(llm.engine.launcher, "launch", failing)
    params = [SamplingParams(temperature=0, max_tokens=2), PARAMS]
    try:
        with pytest.raises(EngineFailed, match="the device is gone") as failure:
            llm.generate([[1, 2], [4, 5]], params, use_tqdm=False, on_output=done.append)
        assert failure.value.outputs == done
        assert [output.outputs[0].token_ids for output in done] == [plain([1, 2], 2)]
        with pytest.raises(EngineFailed, match="the device is gone"):
            llm.generate([[1, 2]], PARAMS, use_tqdm=False)
    finally:
        llm.engine = llm.engine.restarted(llm.engine.config, FixedDraftLen)
