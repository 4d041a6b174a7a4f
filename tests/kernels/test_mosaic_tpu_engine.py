"""The whole engine on the TPU kernel, in the interpreter that knows copies and semaphores."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from mtp_jax import LLM, SamplingParams

pytestmark = [pytest.mark.long, pytest.mark.standard_promotion("as users run it")]


def tokens(backend: str) -> list[list[int]]:
    llm = LLM(
        "tiny-mtp",
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        attention_backend=backend,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        prefill_chunk=16,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = ["def fib(n):", "The President of the United States said to the Congress that"]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_greedy_tokens_of_the_bundled_model_are_the_references() -> None:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()), jax.default_matmul_precision("highest"):
        interpreted = tokens("mosaic_tpu")
    with jax.default_matmul_precision("highest"):
        assert interpreted == tokens("reference")
