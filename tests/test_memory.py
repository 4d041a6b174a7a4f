"""An engine that the device cannot hold is refused before anything is allocated, with both sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mtp_jax import LLM, ConfigError, memory
from mtp_jax.acceptance.match import Match
from mtp_jax.options import engine_config
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.step.program import StepProgram, init_state
from mtp_jax.testing.toy_family import ToyFamily

HUGE = 2**40
BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": HUGE},
        {"block_size": HUGE},
        {"max_num_seqs": HUGE},
        {"max_num_seqs": HUGE, "num_kv_blocks": 4},
        {"max_model_len": HUGE},
        {"max_model_len": HUGE, "num_kv_blocks": 4, "block_size": 1},
    ],
)
def test_what_does_not_fit_is_refused_with_both_sizes(options: dict[str, Any]) -> None:
    family = ToyFamily(max_position_embeddings=HUGE)
    with pytest.raises(ConfigError) as refused:
        LLM.from_weights(family, {}, **{"max_model_len": 64, **options})
    sentence = str(refused.value)
    assert all(f"{name}={value}" in sentence for name, value in options.items())
    assert "B for KV blocks" in sentence
    assert sentence.endswith(
        f"CPU memory has {memory.in_units(memory.available_bytes(jax.devices()[0]) or 0)}; lower them."
    )


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("speculative", "method"), [(None, None), ({"num_speculative_tokens": 2}, "mtp_vanilla")])
def test_pages_are_counted_as_they_are_allocated(
    latent: bool, speculative: dict[str, Any] | None, method: str | None
) -> None:
    family = ToyFamily(num_layers=3, num_mtp_layers=2, latent=latent)
    config = engine_config(family, speculative, max_model_len=40, max_num_seqs=3, num_kv_blocks=7, block_size=4)
    program = StepProgram(
        family=family,
        proposer=PROPOSERS[method].build(family, config.speculative),
        rule=Match(),
        attention_backend="reference",
        num_stop_ids=1,
        list_sizes=config.list_sizes,
        max_logprobs=1,
    )
    state = init_state(program, config, BFLOAT16)
    allocated = sum(pages.nbytes for pages in jax.tree.leaves((state.kv, state.draft_kv)))
    assert memory.needed_bytes(family, config, BFLOAT16)["KV blocks"] == allocated


@pytest.mark.parametrize(
    ("speculative", "num_arrays"),
    [
        (None, 3 * 1),
        ({"num_speculative_tokens": 2}, 3 * 3),
        ({"num_speculative_tokens": 2, "acceptance": "rejection"}, 5 * 3),
        ({"num_speculative_tokens": 2, "acceptance": "rejection", "draft_sampling": "greedy"}, 3 * 3),
        ({"method": "dynamic_tree", "num_speculative_tokens": 2, "tree_topk": 2, "tree_nodes": 6}, 3 * 7),
    ],
    ids=str,
)
def test_logits_are_counted_by_rows_and_by_what_is_made_of_them(
    speculative: dict[str, Any] | None, num_arrays: int
) -> None:
    family = ToyFamily()
    config = engine_config(family, speculative, max_model_len=40, max_num_seqs=3)
    assert memory.needed_bytes(family, config, BFLOAT16)["logits"] == 3 * (num_arrays + 3) * family.vocab_size * 4


def test_memory_in_use_is_not_available() -> None:
    class Accelerator:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int] | None:
            return {"bytes_limit": 100, "bytes_in_use": 30}

    class Silent(Accelerator):
        def memory_stats(self) -> None:
            return None

    assert memory.available_bytes(Accelerator()) == 70
    assert memory.available_bytes(Silent()) is None
