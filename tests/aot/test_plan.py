"""A planned step compiled for chips that are not here: what the compiler says of it agrees with the plan."""

from collections import Counter
from dataclasses import replace

import pytest

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.shapes import StepShape
from mtp_jax.plan.chips import slice_named
from mtp_jax.plan.compiled import compile_step
from mtp_jax.plan.memory import Temporaries, memory_of
from mtp_jax.plan.program import Depth, PlannedStep, abstract_target
from tests.aot.tpu import needs_tpu_compiler
from tests.plan.small import question, small_family

pytestmark = [needs_tpu_compiler, pytest.mark.standard_promotion("as users run it")]


def test_a_compiled_step_takes_what_is_planned() -> None:
    family = small_family("llama", "no_mtp")
    asked = question(family, speculative=SpeculativeConfig(method=None))
    asked = replace(asked, where=slice_named("v5e:2x2"))
    config = asked.config(slots_per_shard=4)
    step = PlannedStep(family, config, "bfloat16", abstract_target(asked.where, config))
    compiled = compile_step(step, StepShape(4, 0), Depth.of(family))
    memory = memory_of(step, Temporaries(0.0, 0.0, "estimate"), share=0.9)
    # The chip pads small arrays to its tiles: of a model this small the arguments are many times larger.
    assert compiled.argument_bytes >= memory.used_bytes(batch=8, context=64)
    kinds = Counter(one.kind for one in compiled.exchanged.least)
    assert kinds["all-reduce"] >= 2 * family.num_layers  # more of them, if it writes other collectives as such
