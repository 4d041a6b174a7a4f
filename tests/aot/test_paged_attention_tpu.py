"""The TPU kernel is accepted by the compiler of each TPU generation, at real sizes, and no pool is copied for it."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, ArgSpec
from kernels_pallas.paged_attention.mosaic_tpu_layout import VMEM_BYTES, default_tile, vmem_bytes
from tests.aot.tpu import TOPOLOGIES, compile_for, needs_tpu_compiler

pytestmark = needs_tpu_compiler

GQA = replace(ARG_SPECS["gqa_32_8_uniform"], page_size=64)
MLA_16 = replace(ARG_SPECS["mla_16_uniform"], k_channels=640)  # 512 + 64, and 64 zeros: see `Backend.channel_multiple`
MLA_128 = replace(ARG_SPECS["mla_128_uniform"], k_channels=640)
TREE = (-1, 0, 0, 1, 1, 2, 2)
PROMPTS = (4096,) * 4

FULL_SIZE: Mapping[str, ArgSpec] = {
    "gqa, 1 row": GQA,
    "gqa, 4 rows": replace(GQA, num_rows=4),
    "gqa, 8 rows, page 16": replace(GQA, num_rows=8, page_size=16),
    "gqa, tree": replace(GQA, num_rows=7, tree_parents=TREE),
    "gqa, chunk of 256": replace(GQA, num_rows=256, committed_len=PROMPTS),
    "mla 16 heads, 1 row": MLA_16,
    "mla 16 heads, 4 rows, page 128": replace(MLA_16, num_rows=4, page_size=128),
    "mla 16 heads, tree": replace(MLA_16, num_rows=7, tree_parents=TREE),
    "mla 128 heads, 1 row": MLA_128,
    "mla 128 heads, 4 rows": replace(MLA_128, num_rows=4),
    "mla 128 heads, 8 rows": replace(MLA_128, num_rows=8),
    "mla 128 heads, chunk of 256": replace(MLA_128, num_rows=256, committed_len=PROMPTS),
}

ONE_OF_EACH_KIND = ("gqa, 4 rows", "gqa, chunk of 256", "mla 16 heads, 4 rows, page 128", "mla 128 heads, 1 row")


def on_every_generation() -> list[Any]:
    """(name, generation); on others than v5e most of them are long."""
    return [
        pytest.param(
            name, generation, marks=[] if generation == "v5e" or name in ONE_OF_EACH_KIND else pytest.mark.long
        )
        for name in FULL_SIZE
        for generation in TOPOLOGIES
    ]


SMALL = replace(GQA, committed_len=(300, 5))
LATENT = replace(MLA_16, committed_len=(300, 5))
ODD: Mapping[str, ArgSpec] = {
    **{f"{rows} rows": replace(SMALL, num_rows=rows) for rows in (2, 3, 5, 7)},
    **{f"page {size}": replace(LATENT, page_size=size) for size in (16, 32, 128)},
    "2 key heads": replace(SMALL, num_kv_heads=2, num_rows=2),
    "16 key heads": replace(SMALL, num_kv_heads=16, num_rows=2),
    "groups of 5": replace(SMALL, num_q_heads=40, num_rows=3),
    "groups of 1": replace(SMALL, num_q_heads=8),
    "64 channels": replace(ARG_SPECS["mqa_8_edges"]),
    "192 channels, latent": replace(ARG_SPECS["mla_8_edges"], num_rows=8),
    "576 channels, latent": replace(LATENT, k_channels=576),
    "a page is the whole table": replace(LATENT, page_size=16, committed_len=(0, 1), num_unused_entries=0),
    "three pages are the whole table": replace(SMALL, page_size=16, committed_len=(33, 1), num_unused_entries=0),
    "tree of 32": replace(LATENT, num_rows=32, tree_parents=(-1, *(0,) * 31)),
    "chunk of 250": replace(SMALL, num_rows=250),
    "float32": replace(SMALL, dtype="float32", num_rows=3),
    "float32, page 8, latent": replace(LATENT, dtype="float32", page_size=8, num_rows=3),
    "a large table": replace(LATENT, committed_len=(64_000,) * 128),
}


def compiled(generation: str, spec: ArgSpec, *, num_pages: int) -> Any:
    """`paged_attention` by name, compiled."""
    pool = (num_pages, spec.page_size, spec.num_kv_heads)
    num_slots = len(spec.committed_len)
    abstract = jax.ShapeDtypeStruct
    rows_BW = (num_slots, spec.num_rows)
    return compile_for(
        generation,
        functools.partial(paged_attention, config=spec.config("mosaic_tpu")),
        abstract((*rows_BW, spec.num_q_heads, spec.k_channels), jnp.dtype(spec.dtype)),
        abstract((*pool, spec.k_channels), jnp.dtype(spec.dtype)),
        None if spec.is_latent else abstract((*pool, spec.v_channels), jnp.dtype(spec.dtype)),
        abstract((num_slots, spec.pages_per_slot), jnp.dtype("int32")),
        abstract((num_slots,), jnp.dtype("int32")),
        None if spec.tree_parents is None else abstract(rows_BW, jnp.dtype("uint32")),
    )


def pool_bytes(spec: ArgSpec, num_pages: int) -> int:
    return spec.kv_bytes // spec.num_pages * num_pages


@pytest.mark.parametrize(("name", "generation"), on_every_generation())
def test_full_size_without_a_copy_of_the_pool(name: str, generation: str) -> None:
    spec = FULL_SIZE[name]
    num_pages = (4 << 30) // pool_bytes(spec, 1)
    program = compiled(generation, spec, num_pages=num_pages)
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes >= 4 << 30
    # Beside the arguments: the output, and queries and output once more, packed. A pool is 4 GiB.
    rows = len(spec.committed_len) * spec.num_rows * spec.num_q_heads
    packed_bytes = rows * (spec.k_channels + spec.v_channels) * 2
    padding = 16 / min(16, spec.num_rows * spec.num_q_heads // spec.num_kv_heads)
    beside = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    assert beside <= 3 * padding * packed_bytes + (1 << 20)
    assert memory.temp_size_in_bytes <= 3 * padding * packed_bytes + (1 << 20)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize("name", ["gqa, tree", "mla 16 heads, 1 row", "mla 128 heads, chunk of 256"])
def test_the_cost_estimate_reaches_the_compiler(name: str) -> None:
    """Both products over full page tables, as no length is known; beside them there is nothing to count."""
    spec = FULL_SIZE[name]
    cost = compiled("v5e", spec, num_pages=1024).cost_analysis()
    scores = len(spec.committed_len) * spec.num_rows * spec.num_q_heads * spec.pages_per_slot * spec.page_size
    assert cost["flops"] == pytest.approx(2 * scores * (spec.k_channels + spec.v_channels), rel=1e-3)
    tiles = -(-spec.num_rows // default_tile(spec.problem()).tile_rows)
    pages = len(spec.committed_len) * spec.pages_per_slot * tiles
    assert cost["bytes accessed"] > pool_bytes(spec, pages)


@pytest.mark.parametrize("generation", ["v5e", pytest.param("tpu7x", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ODD)
def test_odd_shapes_compile(name: str, generation: str) -> None:
    compiled(generation, ODD[name], num_pages=256)


def test_a_pool_with_other_channels_is_copied_whole() -> None:
    """Why `Backend.channel_multiple` is there: XLA keeps 576 channels in another order than the kernel reads them."""
    spec = replace(MLA_16, k_channels=576)
    num_pages = (1 << 30) // pool_bytes(spec, 1)
    memory = compiled("v5e", spec, num_pages=num_pages).memory_analysis()
    assert memory.temp_size_in_bytes > pool_bytes(spec, num_pages)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_estimate_of_vmem_is_within_what_the_kernel_is_given(name: str) -> None:
    problem = FULL_SIZE[name].problem()
    assert vmem_bytes(problem, default_tile(problem)) <= VMEM_BYTES
