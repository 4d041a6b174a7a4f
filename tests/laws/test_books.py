"""Law: the books balance after every operation, for any acceptance, readback depth, preemption and cancellation."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from mtp_jax.testing.host_model import HostMachine


def test_books_balance_after_every_operation() -> None:
    run_state_machine_as_test(HostMachine, settings=settings(stateful_step_count=40))


@pytest.mark.long
def test_books_balance_after_every_operation_at_length() -> None:
    run_state_machine_as_test(HostMachine, settings=settings(max_examples=600, stateful_step_count=60))
