"""Paged attention by its contract, one row and one head at a time, in float64; and what a backend is held to."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import PagedAttentionConfig, paged_attention
from kernels_pallas.paged_attention.arg_specs import ArgSpec, PagedInputs

Run = Callable[..., jax.Array]

OUTPUT_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Half a unit in the last place, relative to the element."""

SCORE_ROUNDING = 2.0**-19.4
"""A score is a float32 sum of up to 576 products: off by about sqrt(576) * 2^-24 of its size. That is the relative
error of its weight, and so of the row."""

jitted = jax.jit(paged_attention, static_argnames="config")


def attended_positions(inputs: PagedInputs, slot: int, row: int) -> list[int]:
    """What the row attends by the contract, as far as the page table goes."""
    base = int(inputs.committed_len_B[slot])
    if base < 0:
        return []
    if inputs.ancestor_bits_BW is None:
        positions = range(base + row + 1)
    else:
        bits = int(inputs.ancestor_bits_BW[slot, row])
        positions = [*range(base), *(base + bit for bit in range(32) if bits >> bit & 1)]
    num_positions = inputs.page_table_BP.shape[1] * inputs.k_pages_NZGC.shape[1]
    return [position for position in positions if position < num_positions]


class Expected(NamedTuple):
    """The oracle's output [B, W, H, E], and the largest absolute score of each row [B, W, H]."""

    out_BWHE: np.ndarray
    score_size_BWH: np.ndarray


def attend(inputs: PagedInputs, config: PagedAttentionConfig) -> Expected:
    """The whole output in float64."""
    q_BWHC = np.asarray(inputs.q_BWHC, np.float64)
    k_NZGC = np.asarray(inputs.k_pages_NZGC, np.float64)
    v_NZGE = k_NZGC if inputs.v_pages_NZGE is None else np.asarray(inputs.v_pages_NZGE, np.float64)
    table_BP = np.asarray(inputs.page_table_BP)
    num_slots, num_rows, num_heads, _ = q_BWHC.shape
    num_pages, page_size, num_kv_heads, _ = k_NZGC.shape
    out_BWHE = np.zeros((num_slots, num_rows, num_heads, config.v_channels))
    score_size_BWH = np.zeros((num_slots, num_rows, num_heads))
    for slot in range(num_slots):
        for row in range(num_rows):
            positions = np.array(attended_positions(inputs, slot, row), np.int64)
            if not positions.size:
                continue
            pages = table_BP[slot, positions // page_size]
            pages = np.where((pages >= 0) & (pages < num_pages), pages, 0)
            offsets = positions % page_size
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                scores = config.scale * k_NZGC[pages, offsets, kv_head] @ q_BWHC[slot, row, head]
                weights = np.exp(scores - scores.max())
                values = v_NZGE[pages, offsets, kv_head, : config.v_channels]
                out_BWHE[slot, row, head] = weights @ values / weights.sum()
                score_size_BWH[slot, row, head] = np.abs(scores).max()
    return Expected(out_BWHE, score_size_BWH)


def assert_rows_close(actual: jax.Array, expected: Expected) -> None:
    """Every row of every head is off by no more than rounding explains; where zero is expected it is zero."""
    actual_BWHE = np.asarray(actual, np.float64)
    assert actual_BWHE.shape == expected.out_BWHE.shape
    assert np.isfinite(actual_BWHE).all(), "something that must not be attended reached the output"
    error_BWH = np.linalg.norm(actual_BWHE - expected.out_BWHE, axis=-1)
    size_BWH = np.linalg.norm(expected.out_BWHE, axis=-1)
    rounding = OUTPUT_ROUNDING[jnp.dtype(actual.dtype).name]
    limit_BWH = (rounding + SCORE_ROUNDING * np.maximum(expected.score_size_BWH, 1.0)) * size_BWH
    worst = np.unravel_index(np.argmax(error_BWH - limit_BWH), error_BWH.shape)
    assert (error_BWH <= limit_BWH).all(), (
        f"slot, row, head {tuple(map(int, worst))} is off by {error_BWH[worst]:.2e} of {size_BWH[worst]:.2e}"
    )


def check(run: Run, spec: ArgSpec, inputs: PagedInputs, *, backend: str = "reference") -> jax.Array:
    """Runs a compiled call of the contract and holds it to the oracle; returns the output."""
    config = spec.config(backend)
    out_BWHE = run(*inputs, config=config)
    assert out_BWHE.dtype == inputs.q_BWHC.dtype
    assert_rows_close(out_BWHE, attend(inputs, config))
    return out_BWHE
