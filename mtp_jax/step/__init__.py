"""The jitted functions: pure, their state donated."""

from mtp_jax.step.decode import decode_step as decode_step
from mtp_jax.step.prefill import prefill_step as prefill_step
from mtp_jax.step.program import StepProgram as StepProgram
from mtp_jax.step.program import init_state as init_state
