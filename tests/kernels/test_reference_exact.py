"""The reference on a CPU: a row's bits do not depend on the call's size; poison of one kind alone stays where it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, ArgSpec, PagedInputs, make_inputs
from tests.kernels.oracle import check, jitted

MLA = replace(ARG_SPECS["mla_8_edges"], dtype="float32")
GQA = replace(ARG_SPECS["mqa_8_edges"], num_kv_heads=2, dtype="float32")
MHA = replace(GQA, num_kv_heads=8)


@pytest.mark.parametrize("spec", [MLA, GQA, MHA], ids=["mla", "gqa", "mha"])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_slots(spec: ArgSpec) -> None:
    spec = replace(spec, num_rows=40, committed_len=(0, 13, 200))
    inputs = make_inputs(spec, jax.random.key(7))
    config = spec.config("reference")
    wide_BWHE = np.asarray(jitted(*inputs, config=config))
    for num_rows in (1, 2, 3, 8):
        for num_slots in (1, 3):
            for first in {0, (40 - num_rows) // 2, 40 - num_rows}:
                part = inputs._replace(
                    q_BWHC=inputs.q_BWHC[:num_slots, first : first + num_rows],
                    committed_len_B=inputs.committed_len_B[:num_slots] + jnp.int32(first),
                    page_table_BP=inputs.page_table_BP[:num_slots],
                )
                out_BWHE = np.asarray(jitted(*part, config=config))
                np.testing.assert_array_equal(out_BWHE, wide_BWHE[:num_slots, first : first + num_rows])


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_a_chunk_of_forty(spec: ArgSpec) -> None:
    check(jitted, *_with_inputs(replace(spec, num_rows=40, committed_len=(0, 1, 8, 100, -1))))


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_nan_in_keys_or_values_alone_does_not_leak(kind: str, is_tree: bool) -> None:
    spec = replace(GQA, num_rows=5, committed_len=(14, 0, -1), tree_parents=(-1, 0, 0, 1, 2) if is_tree else None)
    spec, inputs = _with_inputs(spec)
    assert inputs.v_pages_NZGE is not None
    if kind == "keys":
        inputs = inputs._replace(v_pages_NZGE=jnp.nan_to_num(inputs.v_pages_NZGE, nan=0.5))
    else:
        inputs = inputs._replace(k_pages_NZGC=jnp.nan_to_num(inputs.k_pages_NZGC, nan=0.5))
    check(jitted, spec, inputs)


def _with_inputs(spec: ArgSpec) -> tuple[ArgSpec, PagedInputs]:
    return spec, make_inputs(spec, jax.random.key(3))
