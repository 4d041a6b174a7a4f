"""A step compiled for devices that are not here: what its compiler says of memory, and what it exchanges."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
from jax.experimental.compilation_cache import compilation_cache

from mtp_jax.core.shapes import StepShape
from mtp_jax.plan.hlo import Collectives, read_collectives
from mtp_jax.plan.program import Depth, PlannedStep, compiler_target


@dataclass(frozen=True)
class CompiledStep:
    """Of one compiled program, on one device. `slots` are a data shard's."""

    depth: Depth
    slots: int
    draft_len: int
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    exchanged: Collectives
    seconds: float


def compile_step(step: PlannedStep, shape: StepShape, depth: Depth) -> CompiledStep:
    """Compiles a planned step with the platform's own compiler. `ConfigError` where that is not installed."""
    step = replace(step, target=compiler_target(step.target.slice, step.config))
    began = time.perf_counter()
    with without_compile_cache():
        compiled = step.lower(shape).compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    where = step.target.slice
    return CompiledStep(
        depth=depth,
        slots=shape.slots,
        draft_len=shape.draft_len,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        exchanged=read_collectives(
            compiled.as_text(), num_devices=where.num_devices, devices_per_host=where.devices_per_host
        ),
        seconds=seconds,
    )


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Programs for chips that are not here can be kept, but not read back."""
    is_enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is a cache is asked once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", is_enabled)
        compilation_cache.reset_cache()
