"""The model that ships, on the CPU: drafts change nothing, and coupled drafts agree more often than argmax ones."""

import json
from functools import cache

import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.checkpoints.folders import find_model
from mtp_jax.outputs import RequestOutput

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.standard_promotion("the tokenizer's and the model's own float32 path, as users run it"),
]

PROMPTS = (
    "def read_config(path):",
    "The President said to the Congress",
    "To install the package, run",
    "class Parser:",
)
NUM_TOKENS = 80


@cache
def llm(draft_sampling: str | None) -> LLM:
    speculative = {"method": "mtp", "num_speculative_tokens": 1, "draft_sampling": draft_sampling}
    return LLM(
        "tiny-mtp",
        speculative_config=speculative if draft_sampling else None,
        max_model_len=112,
        max_num_seqs=1,
        prefill_chunk=16,
    )


@cache
def outputs(draft_sampling: str | None, temperature: float) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    return llm(draft_sampling).generate(list(PROMPTS), params, use_tqdm=False)


def acceptance(draft_sampling: str, temperature: float) -> float:
    """Share of all drafts that were accepted."""
    metrics = [output.metrics for output in outputs(draft_sampling, temperature)]
    return sum(m.num_accepted_tokens for m in metrics) / sum(m.num_draft_tokens for m in metrics)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("draft_sampling", ["coupled", "greedy"])
def test_drafting_writes_what_plain_decoding_writes(draft_sampling: str, temperature: float) -> None:
    plain = [output.outputs[0] for output in outputs(None, temperature)]
    drafted = [output.outputs[0] for output in outputs(draft_sampling, temperature)]
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert all(len(one.token_ids) == NUM_TOKENS for one in plain)


def test_it_is_small_and_divides_over_eight_devices() -> None:
    folder = find_model("tiny-mtp")
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 12_000_000
    config = json.loads((folder / "config.json").read_text())
    divided = ("num_attention_heads", "n_routed_experts", "intermediate_size", "moe_intermediate_size", "vocab_size")
    assert [config[name] % 8 for name in divided] == [0] * len(divided)
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (128, 64)


def test_half_of_the_greedy_drafts_stand() -> None:
    assert acceptance("coupled", 0.0) > 0.5


def test_coupled_drafts_stand_more_often_than_argmax_ones_when_sampling() -> None:
    assert acceptance("coupled", 1.0) > acceptance("greedy", 1.0) + 0.05


def test_a_mesh_writes_what_one_device_writes() -> None:
    """Two data shards of four devices each: heads, experts and vocabulary split, one vote a step."""
    on_mesh = LLM(
        "tiny-mtp",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        mesh={"data": 2, "model": 4},
        max_model_len=112,
        max_num_seqs=2,
        prefill_chunk=16,
    )
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(4)]
    got = [output.outputs[0].token_ids for output in on_mesh.generate(list(PROMPTS), params, use_tqdm=False)]
    assert got == [output.outputs[0].token_ids[:30] for output in outputs(None, 0.8)]
