"""What users type is there and documented: the names below are the stable ones, each explained where it stands."""

import dataclasses
import inspect
import re
from typing import Any

import pytest

import mtp_jax
import mtp_jax.testing
from kernels_pallas.grouped_matmul.api import grouped_matmul
from kernels_pallas.paged_attention import api as attention
from mtp_jax.cli.main import COMMANDS, command_of
from mtp_jax.engine.requests import RequestMetrics, StepRecord
from mtp_jax.options import engine_config
from mtp_jax.outputs import CompletionOutput, Logprob, RequestOutput
from mtp_jax.testing import checks, driving, oracle, policies, rows, strategies, toy_family
from tests.architecture.repository import ROOT, sources

FIELDS: dict[type, str] = {
    mtp_jax.SpeculativeConfig: "method model num_speculative_tokens policy draft_len_schedule near_limit acceptance "
    "draft_sampling disable_below_acceptance acceptance_window relaxed_topk relaxed_delta tree_topk tree_nodes "
    "draft_vocab_size synthetic_acceptance",
    mtp_jax.SamplingParams: "temperature top_k top_p min_p seed max_tokens min_tokens stop stop_token_ids ignore_eos "
    "logprobs prompt_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias bad_words n",
    RequestOutput: "request_id prompt prompt_token_ids outputs metrics",
    CompletionOutput: "token_ids text finish_reason error stop_reason logprobs",
    Logprob: "logprob rank decoded_token",
    RequestMetrics: "num_steps num_draft_tokens num_accepted_tokens accepted_per_pos draft_lens",
    StepRecord: "draft_len draft_cap drafts target_tokens num_accepted emitted committed_len_before "
    "committed_len_after num_pages",
}
OPTIONS = [
    "max_model_len",
    "max_num_seqs",
    "block_size",
    "num_kv_blocks",
    "attention_backend",
    "mesh",
    "async_scheduling",
    "readback_depth",
    "prefill_chunk",
    "enable_prefix_caching",
    "numerics",
    "seed",
]
METRICS = ["num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"]
CLI: dict[str, str] = {
    "generate": "--model --num-speculative-tokens --temperature --max-tokens --seed --mesh --compare",
    "run-batch": "--model --mesh --resume --distributed --coordinator --process-id --num-processes --metrics-port",
    "bench decode": "",
    "bench attention": "",
    "bench batch": "",
    "bench policy": "",
    "convert": "--to --check",
    "pull": "",
    "train": "",
    "eval-heads": "--data",
    "report": "",
    "doctor": "--json",
}
FOR_TESTS: dict[Any, str] = {
    checks: "check_step_record check_pages check_trace",
    oracle: "plain_decode",
    strategies: "requests draft_schedules acceptance_masks plans batches",
    toy_family: "ToyFamily",
}
WITH_EXAMPLES = (
    mtp_jax.LLM,
    mtp_jax.SamplingParams,
    mtp_jax.SpeculativeConfig,
    engine_config,
    RequestMetrics,
    attention.paged_attention,
    grouped_matmul,
    checks.check_step_record,
    checks.check_trace,
    oracle.plain_decode,
    driving.Plan,
    policies.ScriptedDraftLen,
    rows.sampling_rows,
)


@pytest.mark.parametrize(("kind", "names"), FIELDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_is_there_and_in_the_docstring(kind: type, names: str) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    assert set(names.split()) <= fields
    undocumented = [name for name in sorted(fields) if not re.search(rf"`{name}[`=\[]", kind.__doc__ or "")]
    assert undocumented == []


def test_every_option_of_llm_is_there_and_in_a_docstring() -> None:
    taken = set(inspect.signature(engine_config).parameters)
    assert set(OPTIONS) <= taken
    assert [
        name for name in taken - {"family", "speculative_config"} if f"`{name}" not in (engine_config.__doc__ or "")
    ] == []
    assert {"model", "speculative_config", "dtype"} <= set(inspect.signature(mtp_jax.LLM).parameters)


@pytest.mark.parametrize("name", ["generate", "generate_each", "stream", "trace", "get_metrics", "from_weights"])
def test_every_method_of_llm_says_what_it_returns(name: str) -> None:
    assert len(inspect.getdoc(getattr(mtp_jax.LLM, name)) or "") > 40


def test_totals_have_vllms_names() -> None:
    source = inspect.getsource(mtp_jax.LLM.get_metrics)
    assert [name for name in METRICS if f'"spec_decode_{name}"' not in source] == []
    assert isinstance(inspect.getattr_static(RequestMetrics, "mean_acceptance_length"), property)


@pytest.mark.parametrize("name", CLI)
def test_every_command_has_its_options(name: str) -> None:
    assert name in COMMANDS
    _, parser = command_of(name)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {*CLI[name].split(), "--config", "--print-config"} <= flags


@pytest.mark.parametrize(("module", "names"), FOR_TESTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_property_tests_need_ships(module: Any, names: str) -> None:
    for name in names.split():
        assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name} has no docstring"


def test_arrays_in_public_signatures_have_shapes() -> None:
    bare = re.compile(r"^def [a-z]\w*\([^)]*: (?:jax\.)?Array\b", re.MULTILINE)
    found = []
    for path in sources("mtp_jax/ops", "mtp_jax/acceptance", "mtp_jax/proposers", "mtp_jax/step"):
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in bare.finditer(path.read_text())]
    assert found == []


@pytest.mark.parametrize("thing", WITH_EXAMPLES, ids=lambda thing: thing.__name__)
def test_an_example_stands_in_the_docstring(thing: Any) -> None:
    assert ">>>" in (thing.__doc__ or "")


def test_the_kernel_says_shapes_and_errors() -> None:
    text = inspect.getdoc(attention.paged_attention) or ""
    assert "[B, W, H" in text
    assert "ValueError" in text
    assert "NotImplementedError" in text


def test_a_field_without_a_word_is_seen() -> None:
    @dataclasses.dataclass
    class Lacking:
        """Has `one` field."""

        one: int = 0
        another: int = 0

    with pytest.raises(AssertionError, match="another"):
        test_every_field_is_there_and_in_the_docstring(Lacking, "one")
