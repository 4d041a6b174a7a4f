"""The bundled model's whole steps, attention kernel included, compiled for a TPU that is not here."""

import re

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.acceptance.match import Match
from mtp_jax.checkpoints import load_model
from mtp_jax.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from mtp_jax.core.shapes import PrefillShape, StepShape
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.ops.placement import Placement
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.step.program import StepProgram, init_state
from mtp_jax.step.run import make_run
from tests.aot.tpu import compile_for, needs_tpu_compiler

pytestmark = [needs_tpu_compiler, pytest.mark.standard_promotion("as users run it")]

NUM_PAGES = 60_000


@pytest.mark.parametrize("shape", [StepShape(4, 2), PrefillShape(256)], ids=str)
def test_a_step_of_the_bundled_model_keeps_one_page_pool(shape: StepShape | PrefillShape) -> None:
    loaded = load_model("tiny-mtp")
    family = loaded.family
    speculative = SpeculativeConfig(num_speculative_tokens=2)
    config = EngineConfig(
        max_model_len=1024,
        max_num_seqs=4,
        cache=CacheConfig(page_size=16, num_pages=NUM_PAGES),
        speculative=speculative,
        attention_backend="mosaic_tpu",
    )
    proposer = PROPOSERS["mtp_eagle"].build(family, speculative)
    program = StepProgram(
        family=family,
        proposer=proposer,
        rule=Match(),
        attention_backend=config.attention_backend,
        num_stop_ids=config.max_stop_token_ids,
        list_sizes=config.list_sizes,
        max_logprobs=config.max_logprobs,
    )
    dtype = jnp.dtype("bfloat16")
    state = jax.eval_shape(lambda: init_state(program, config, dtype))
    placement = Placement()
    packed = BatchBuilder(config, placement).idle_inputs(shape)
    step = make_run(program, shape, placement, weight_specs=None, state_specs=None)
    compiled = compile_for("v5e", step, loaded.weights, state, packed, donate=(1,))
    layers = (*state.kv, *state.draft_kv)
    layer_bytes = (NUM_PAGES + 1) * 16 * 256 * 2  # 192 channels, stored as 256
    assert {layer.k_pages.size * 2 for layer in layers} == {layer_bytes}
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= len(layers) * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes / 4
    # A kernel for each layer of the target. The draft layer runs over what the step before accepted, where its keys are
    # all that is used, then once for each draft.
    num_kernels = len(re.findall(r"%paged_attention_tpu[.\d]* = ", compiled.as_text()))
    assert num_kernels == len(state.kv) + (shape.draft_len if isinstance(shape, StepShape) else 0)
