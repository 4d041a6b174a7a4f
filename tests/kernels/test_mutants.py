"""The checks that hold a backend to the contract fail on a backend with a fault. Each fault is planted here."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import paged_attention, reference
from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, ArgSpec, PagedInputs, make_inputs
from tests.kernels.oracle import Run, check, jitted

SPECS = (
    replace(ARG_SPECS["mla_8_edges"], dtype="float32"),
    replace(ARG_SPECS["mla_8_tree"], dtype="float32"),
    replace(ARG_SPECS["mqa_8_edges"], num_kv_heads=4, dtype="float32"),
)


def with_inputs(change: Callable[[PagedInputs], PagedInputs]) -> Run:
    """A backend that reads its inputs wrongly."""
    return lambda *arrays, config: paged_attention(*change(PagedInputs(*arrays)), config=config)


def with_source(old: str, new: str) -> Run:
    """The reference with one piece of its text replaced."""
    source = Path(reference.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the reference"
    module = ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    return lambda *arrays, config: module.paged_attention_reference(*arrays, config=config)


def longer_by(step: int) -> Run:
    return with_inputs(
        lambda inputs: inputs._replace(
            committed_len_B=jnp.where(inputs.committed_len_B < 0, inputs.committed_len_B, inputs.committed_len_B + step)
        )
    )


def bits_changed(change: Callable[[jax.Array], jax.Array]) -> Run:
    return with_inputs(
        lambda inputs: inputs._replace(
            ancestor_bits_BW=None if inputs.ancestor_bits_BW is None else change(inputs.ancestor_bits_BW)
        )
    )


def own_bits(bits_BW: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.uint32(1) << jnp.arange(bits_BW.shape[1], dtype=jnp.uint32)[None], bits_BW.shape)


MUTANTS: dict[str, Run] = {
    "pages in reverse order": with_inputs(lambda i: i._replace(page_table_BP=i.page_table_BP[:, ::-1])),
    "first two pages swapped": with_inputs(
        lambda i: i._replace(page_table_BP=i.page_table_BP.at[:, :2].set(i.page_table_BP[:, 1::-1]))
    ),
    "another slot's pages": with_inputs(lambda i: i._replace(page_table_BP=jnp.roll(i.page_table_BP, 1, axis=0))),
    "a length too long by one": longer_by(1),
    "a length too short by one": longer_by(-1),
    "a row does not attend itself": with_source("ahead_B1S <= jnp.arange", "ahead_B1S < jnp.arange"),
    "rows attend all rows": with_source("jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]", "num_rows - 1"),
    "the last block is not read": with_source("-(-longest // block_len)", "longest // block_len"),
    "blocks of other sizes summed as equals": with_source("* decay_BGWJ[..., None]", ""),
    "ancestor bits are ignored": bits_changed(lambda bits: (own_bits(bits) << 1) - 1),
    "one ancestor bit is ignored": bits_changed(lambda bits: bits & ~jnp.uint32(2) | own_bits(bits)),
    "a row of a tree attends only itself": bits_changed(own_bits),
    "a sibling is attended": bits_changed(lambda bits: bits.at[:, 2].set(bits[:, 2] | 2)),
    "dead slots are read": with_source("& (base_B >= 0)[:, None, None]", ""),
    "values are masked by multiplying": with_source("jnp.where(is_finite_BSGE, v_BSGE, 0.0)", "v_BSGE"),
    "weights are masked by multiplying": with_source(
        "jnp.where(attended_BGWJS, scores, _MASKED)", "scores + (~attended_BGWJS).astype(jnp.float32) * _MASKED"
    ),
    "no scale": with_source(" * config.scale", ""),
    "page ids are not checked": with_source("jnp.where(is_page_BP, page_table_BP, 0)", "jnp.abs(page_table_BP)"),
    "query heads are dealt out to key heads": with_inputs(
        lambda i: i._replace(
            q_BWHC=i.q_BWHC.reshape(*i.q_BWHC.shape[:2], 2, -1, i.q_BWHC.shape[3])
            .swapaxes(2, 3)
            .reshape(i.q_BWHC.shape)
        )
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    run = jax.jit(MUTANTS[name], static_argnames="config")
    assert any(is_caught(run, spec, inputs) for spec, inputs in cases())


def is_caught(run: Run, spec: ArgSpec, inputs: PagedInputs) -> bool:
    try:
        check(run, spec, inputs)
    except AssertionError:
        return True
    return False


def test_the_unplanted_reference_passes_the_same_cases() -> None:
    assert not any(is_caught(jitted, spec, inputs) for spec, inputs in cases())


def cases() -> Iterator[tuple[ArgSpec, PagedInputs]]:
    key = jax.random.key(7)
    for spec in SPECS:
        yield spec, make_inputs(spec, key)
    stray = make_inputs(SPECS[0], key)
    yield (
        SPECS[0],
        stray._replace(
            k_pages_NZGC=stray.k_pages_NZGC.at[0].set(0.5), page_table_BP=stray.page_table_BP.at[2, 1].set(-1)
        ),
    )
