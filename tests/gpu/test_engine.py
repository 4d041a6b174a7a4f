"""The engine on a GPU: the loop reads nothing implicitly, and tokens are the CPU's.

Run on a machine with a GPU: ``python -m pytest --gpu tests/gpu``.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import LLM, CompletionOutput, SamplingParams
from mtp_jax.checkpoints import load_model
from mtp_jax.core.config import EngineConfig, SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request

pytestmark = [pytest.mark.gpu, pytest.mark.standard_promotion]

PROMPTS = ("def fib(n):", "The President said to the Congress", "To install the package, run", "import numpy as np\n")


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def tokens_of(llm: LLM, temperature: float) -> list[list[int]]:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=96, ignore_eos=True) for i in range(4)]
    return [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_tokens_equal_plain_ones_in_float32(temperature: float) -> None:
    options = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 4}
    plain = tokens_of(LLM("tiny-mtp", **options), temperature)
    drafted = tokens_of(LLM("tiny-mtp", speculative_config={"method": "mtp"}, **options), temperature)
    assert drafted == plain
    assert all(len(tokens) == 96 for tokens in plain)


def test_the_loop_makes_no_implicit_transfer_either_way() -> None:
    loaded = load_model("tiny-mtp", dtype="float32")
    config = EngineConfig(max_model_len=128, max_num_seqs=2, speculative=SpeculativeConfig(num_speculative_tokens=3))
    engine = Engine(loaded.family, loaded.weights, config)
    params = SamplingParams(temperature=0.7, max_tokens=40, logprobs=2, ignore_eos=True)
    for index in range(3):
        engine.submit(Request(str(index), (5, 6, 7 + index), params, seed=index))
    finished = {}
    with jax.transfer_guard_device_to_host("disallow"), jax.transfer_guard_host_to_device("disallow"):
        for progress in engine.run():
            if progress.finish_reason is not None:
                finished[progress.request_id] = progress.state
    assert sorted(finished) == ["0", "1", "2"]
    assert all(len(state.tokens) == len(state.logprobs) == 40 for state in finished.values())


def test_the_guard_of_the_test_above_does_fire() -> None:
    on_device = jnp.arange(3) + 1
    with jax.transfer_guard_device_to_host("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        np.asarray(on_device)


# --- the Hopper kernels in the whole engine


TREE = {"method": "dynamic_tree", "num_speculative_tokens": 3, "tree_topk": 2, "tree_nodes": 6}


def outputs_of(dtype: str, backend: str, speculative_config: dict[str, Any] | None) -> list[CompletionOutput]:
    llm = LLM(
        "tiny-mtp",
        dtype=dtype,
        attention_backend=backend,
        speculative_config=speculative_config,
        max_model_len=160,
        max_num_seqs=4,
        prefill_chunk=64,
    )
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, logprobs=2)
    return [output.outputs[0] for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]


@pytest.mark.parametrize("speculative_config", [None, {"method": "mtp"}, TREE], ids=["plain", "mtp", "tree"])
def test_mosaic_gpu_gives_the_greedy_tokens_of_the_reference_in_float32(
    speculative_config: dict[str, Any] | None,
) -> None:
    expected = [output.token_ids for output in outputs_of("float32", "reference", None)]
    assert [output.token_ids for output in outputs_of("float32", "mosaic_gpu", speculative_config)] == expected


@pytest.mark.parametrize("speculative_config", [None, TREE], ids=["plain", "tree"])
def test_in_bfloat16_the_first_different_token_was_nearly_a_tie(
    speculative_config: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = outputs_of("bfloat16", "reference", None)
    kernel = outputs_of("bfloat16", "mosaic_gpu", speculative_config)
    for prompt, expected, given in zip(PROMPTS, reference, kernel, strict=True):
        pairs = enumerate(zip(expected.token_ids, given.token_ids, strict=True))
        first = next((index for index, (one, other) in pairs if one != other), None)
        if first is None:
            continue
        assert expected.logprobs is not None
        top = sorted((entry.logprob for entry in expected.logprobs[first].values()), reverse=True)
        margin = top[0] - top[1]
        with capsys.disabled():
            print(f"\n{prompt!r}: token {first} differs; the reference's top-2 margin there is {margin:.4f} nats")
        assert margin < BF16_TIE


BF16_TIE = 0.1
"""Nats: logits of about 20 are bfloat16 numbers 2^-4 apart or nearer, and ten layers lie before them."""
