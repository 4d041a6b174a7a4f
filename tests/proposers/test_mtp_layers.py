"""Drafts of the engine against teacher-forced predictions of the whole text, for layers that chain and that do not."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request
from mtp_jax.models.registry import family_from_config
from mtp_jax.testing.engines import without_optimizations
from mtp_jax.train.loss import predict
from tests.train.tiny import TINY_TWO_LAYERS

WIDTH = 32


@pytest.mark.parametrize("chains", [True, False])
def test_each_layer_gets_the_hidden_state_its_family_says(chains: bool) -> None:
    family = replace(family_from_config(TINY_TWO_LAYERS), chains_mtp_layers=chains)  # type: ignore[type-var]
    weights = family.init_weights(jax.random.key(3), jnp.float32)
    config = EngineConfig(
        max_model_len=WIDTH,
        max_num_seqs=1,
        cache=CacheConfig(page_size=4),
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        prefill_chunk=4,
    )
    engine: Any = without_optimizations(lambda: Engine(family, weights, config))
    prompt = (1, 5, 2, 7, 3, 6)
    engine.submit(Request("a", prompt, SamplingParams(temperature=0, max_tokens=16), seed=0, wants_trace=True))
    last = [*engine.run()][-1].state
    text = [*prompt, *last.tokens]
    predicted = jax.jit(lambda tokens: predict(family, weights, tokens, 2).drafts)
    num_checked = 0
    for record in last.records:
        if len(record.drafts) == 2:
            known = text[: record.committed_len_before + 1]
            tokens = np.zeros((1, WIDTH + 2), np.int32)
            tokens[0, : len(known) + 1] = [*known, record.drafts[0]]
            first, second = predicted(jnp.asarray(tokens))
            assert int(jnp.argmax(first[0, len(known) - 2])) == record.drafts[0]
            assert int(jnp.argmax(second[0, len(known) - 1])) == record.drafts[1]
            num_checked += 1
    assert num_checked > 4
