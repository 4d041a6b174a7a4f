"""Faults that the tests of the TPU kernel find: each is planted, and must be seen where copies are run as written."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.arg_specs import ArgSpec, make_inputs
from kernels_pallas.paged_attention.mosaic_tpu_attend import Kernel, Step
from tests.kernels.oracle import attended_positions
from tests.kernels.test_mosaic_tpu import GQA, KEY, TPU, TREE, Attention, check_tpu
from tests.kernels.test_mosaic_tpu import _interpreter_reset as _interpreter_reset  # a fixture, used by all tests here


def _with_step(change: Callable[[Step, Any], tuple[Step, Any]]) -> Callable[[Any], Any]:
    def wrapped(original: Any) -> Any:
        def start(self: Kernel, step: Step, block: Any, buffer: Any) -> None:
            step, block = change(step, block)
            original(self, step, block, buffer)

        return start

    return wrapped


def _pages_in_reverse(original: Any) -> Any:
    def copies(self: Kernel, page: Any, index: Any, buffer: Any) -> Any:
        return original(self, page, self.layout.block_pages - 1 - index, buffer)

    return copies


def _without_bits(original: Any) -> Any:
    return lambda self, step, block: original(replace(self, bits_ref=None), step, block)


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "pages of a block in reverse": ("copies", _pages_in_reverse),
    "the block before is copied again": ("start", _with_step(lambda step, block: (step, jnp.maximum(block - 1, 0)))),
    "nobody waits": ("wait", lambda original: lambda self, step, block, buffer: None),
    "the wait is one page short": (
        "wait",
        lambda original: (
            lambda self, step, block, buffer: original(
                self, step, block + jnp.where(self.num_pages_of(step, block) == 1, 1 << 20, 0), buffer
            )
        ),
    ),
    "the buffer that is being filled is read": (
        "heads",
        lambda original: lambda self, buffers, buffer: original(self, buffers, 1 - buffer),
    ),
    "a length too long by one": ("base", lambda original: lambda self, slot: original(self, slot) + 1),
    "a length too short by one": ("base", lambda original: lambda self, slot: original(self, slot) - 1),
    "the last position is not read": ("end", lambda original: lambda self, step: original(self, step) - 1),
    "one position too many needs no mask": (
        "whole_until",
        lambda original: lambda self, step: original(self, step) + 1,
    ),
    "values that are not finite count as finite": (
        "is_finite",
        lambda original: staticmethod(lambda x: jnp.ones(x.shape, bool)),
    ),
    "rows that attend bad values are not told": (
        "bad_positions",
        lambda original: lambda self, v_SE: jnp.zeros((1, v_SE.shape[0]), bool),
    ),
    "sums of another largest score count as they are": (
        "decay",
        lambda original: staticmethod(lambda old_top, top: jnp.ones_like(top)),
    ),
    "trees are attended as chains": ("attended", _without_bits),
    "heads in another order": ("heads", lambda original: lambda self, *at: original(self, *at)[::-1]),
}

FAULT_SPECS = (
    replace(GQA, committed_len=(70, -1, 31, 30), num_rows=2),
    replace(TREE, committed_len=(30, -1, 63)),
)


def is_caught(run: Attention, spec: ArgSpec) -> bool:
    poisoned = make_inputs(spec, KEY)
    position = spec.committed_len[0] + 1  # the second row's own
    at = (poisoned.page_table_BP[0, position // 16], position % 16)
    if poisoned.v_pages_NZGE is None:
        poisoned = poisoned._replace(k_pages_NZGC=poisoned.k_pages_NZGC.at[at].set(jnp.nan))
    else:
        poisoned = poisoned._replace(v_pages_NZGE=poisoned.v_pages_NZGE.at[at].set(jnp.nan))
    try:
        check_tpu(spec, run=run)
        out_BWHE = np.asarray(run(*poisoned, config=spec.config("mosaic_tpu")))
    except (AssertionError, RuntimeError):
        return True
    attends_W = np.array([position in attended_positions(poisoned, 0, row) for row in range(spec.num_rows)])
    return not (np.isnan(out_BWHE[0, attends_W]).all() and np.isfinite(out_BWHE[0, ~attends_W]).all())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, fault = FAULTS[name]
    monkeypatch.setattr(Kernel, method, fault(getattr(Kernel, method)))
    caught = False
    for spec in FAULT_SPECS:
        caught = caught or is_caught(TPU, spec)
        pltpu.reset_tpu_interpret_mode_state()
    assert caught


def test_the_kernel_without_a_fault_passes_the_same_cases() -> None:
    assert not any(is_caught(TPU, spec) for spec in FAULT_SPECS)
