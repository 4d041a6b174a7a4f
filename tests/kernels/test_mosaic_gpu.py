"""The Hopper kernels without a GPU: their arithmetic in Pallas' interpreter, and that they lower for CUDA.

The interpreter runs copies, barriers and warpgroups as they are written, one CTA after the other; it does not know the
hardware's limits. Lowering for "cuda" does: it ends in the module that the GPU's compiler gets.
"""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import PagedAttentionConfig
from kernels_pallas.paged_attention.arg_specs import ArgSpec, make_inputs
from kernels_pallas.paged_attention.contract import Problem
from tests.kernels.oracle import check

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(f"jax {jax.__version__} has no public interpreter for Mosaic GPU", allow_module_level=True)

from kernels_pallas.paged_attention import (  # noqa: E402 - needs the module that the line above asks for
    mosaic_gpu,
    mosaic_gpu_attend,
    mosaic_gpu_combine,
    mosaic_gpu_common,
    mosaic_gpu_exact,
    mosaic_gpu_latent,
    mosaic_gpu_pieces,
    mosaic_gpu_schedule,
    mosaic_gpu_tile,
    mosaic_gpu_turned,
    mosaic_gpu_turned_combine,
)

KEY = jax.random.key(3)
GQA = ArgSpec(8, 2, 64, 64, False, 16, 2, (70, -1, 5, 126), scale=0.3)
TREE = replace(GQA, page_size=32, num_rows=3, committed_len=(62, 0), tree_parents=(-1, 0, 0))
LATENT = ArgSpec(16, 1, 128, 64, True, 64, 1, (130, 61), scale=0.3)
WIDE = ArgSpec(8, 1, 576, 512, True, 128, 5, (66,), scale=0.1)  # 40 packed rows: two warpgroups attend
TURNED = replace(WIDE, num_rows=1)  # 8
CHUNK = replace(GQA, num_rows=40, committed_len=(70, 0, -1), page_size=32)  # of a prompt: three row tiles
SPECS = {"gqa": GQA, "tree": TREE, "latent": LATENT, "wide": WIDE, "chunk": CHUNK}


def run(*arrays: Any, config: PagedAttentionConfig, num_ctas: int = 3) -> jax.Array:
    """The kernels in the interpreter, on so few CTAs that items are cut."""
    q, k, v, table, _, bits = arrays
    default = mosaic_gpu.default_tile(Problem.of(q, k, v, table, bits, config))
    tile = replace(default, num_ctas=num_ctas, min_share=1, overhead=1)
    if config.v_channels <= mosaic_gpu_tile.MAX_NARROW:  # blocks so small that short contexts have several
        tile = replace(tile, block=64, num_stages=2)
    interpret = plgpu.InterpretGPUParams()
    return mosaic_gpu.paged_attention_gpu(*arrays, config=config, tile=tile, interpret=interpret)


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16(name: str) -> None:
    check(run, SPECS[name], make_inputs(SPECS[name], KEY))


@pytest.mark.parametrize("spec", [replace(TREE, dtype="float32"), replace(LATENT, dtype="float32", num_q_heads=2)])
def test_float32(spec: ArgSpec) -> None:
    check(run, spec, make_inputs(spec, KEY))


@pytest.mark.parametrize(
    "spec",
    [
        replace(WIDE, committed_len=(260, 5, -1, 130), page_size=16),
        replace(WIDE, k_channels=512),  # no channels behind the values
        replace(TURNED, committed_len=(260, 5, -1, 60), page_size=16, num_rows=3, tree_parents=(-1, 0, 0)),
        replace(TURNED, k_channels=512),
    ],
    ids=["cut", "no tail", "turned, cut", "turned, no tail"],
)
def test_wide_latent_values(spec: ArgSpec) -> None:
    check(run, spec, make_inputs(spec, KEY))


def test_a_nan_value_reaches_the_rows_that_attend_it_only() -> None:
    spec = replace(GQA, committed_len=(5,), num_q_heads=2, num_kv_heads=1)
    inputs = make_inputs(spec, KEY)
    page = inputs.page_table_BP[0, 0]
    poisoned = inputs._replace(
        v_pages_NZGE=jnp.asarray(inputs.v_pages_NZGE).at[page, 6].set(jnp.nan)
    )  # the second row's own
    out_BWHE = np.asarray(run(*poisoned, config=spec.config("mosaic_gpu"), num_ctas=1).astype(jnp.float32))
    assert np.isfinite(out_BWHE[:, 0]).all()
    assert np.isnan(out_BWHE[:, 1]).all()


@pytest.mark.parametrize(
    "spec",
    [
        replace(GQA, committed_len=(40, 5), num_q_heads=2, num_kv_heads=1),
        replace(GQA, committed_len=(40, 5), num_q_heads=2, num_kv_heads=1, dtype="float32"),
        replace(TURNED, committed_len=(70, 5), page_size=32),
        replace(WIDE, committed_len=(70, 5), page_size=64),
    ],
    ids=["gqa", "float32", "turned", "wide"],
)
def test_page_ids_that_name_no_page_and_lengths_past_the_table_are_harmless(spec: ArgSpec) -> None:
    inputs = make_inputs(replace(spec, num_unused_entries=0), KEY)
    table_BP = inputs.page_table_BP
    num_pages = inputs.k_pages_NZGC.shape[0]
    finite = [None if pages is None else jnp.nan_to_num(pages, nan=0.5) for pages in inputs[1:3]]
    stray = inputs._replace(
        k_pages_NZGC=finite[0],
        v_pages_NZGE=finite[1],
        page_table_BP=table_BP.at[0, 1].set(2**31 - 1).at[1, 0].set(-7).at[1, 1].set(num_pages),
        committed_len_B=jnp.array([spec.committed_len[0], 999], jnp.int32),
    )
    check(run, spec, stray)


def test_parts_of_peaked_rows_are_weighed_by_their_sums() -> None:
    spec = replace(LATENT, scale=4.0)
    check(functools.partial(run, num_ctas=5), spec, make_inputs(spec, KEY))


# --- the work list, in plain numbers


@pytest.mark.parametrize("num_ctas", [1, 3, 7, 50])
@pytest.mark.parametrize("lens", [(0, 5, -1, 700, 63), (64, 64, 64), (-1, -1), (1000,), (-1, 3) * 9])
def test_the_work_list_covers_every_block_once(lens: tuple[int, ...], num_ctas: int) -> None:
    spec = replace(GQA, committed_len=lens)
    tile = mosaic_gpu.TileConfig(block=64, num_stages=2, overhead=1, num_ctas=num_ctas, min_share=2)
    layout = mosaic_gpu.make_layout(spec.problem(), spec.num_pages, tile)
    covered = np.zeros((layout.num_items, 64), int)
    shares = []
    lens_B = jnp.array(lens, jnp.int32)
    for cta in range(num_ctas):
        seen: list[tuple[int, int, int]] = []

        def note(part: mosaic_gpu_schedule.Part, carry, seen=seen, cta=cta):
            seen.append((int(part.item), int(part.first), int(part.last)))
            assert int(part.first_cta) <= cta <= int(part.last_cta)
            return carry

        with jax.disable_jit():
            share = mosaic_gpu_schedule.own_share(layout, lens_B, jnp.int32(cta))
            mosaic_gpu_schedule.for_each_part(layout, lens_B, share, note, jnp.int32(0))
        for item, first, last in seen:
            covered[item, first:last] += 1
        shares.append(sum(last - first for _, first, last in seen))
    for item in range(layout.num_items):
        length = lens[item // layout.items_per_slot]
        blocks = -(-(length + spec.num_rows) // tile.block) if length >= 0 else 0
        assert covered[item].tolist() == [1] * blocks + [0] * (64 - blocks)
    assert max(shares) <= max(2, -(-(sum(shares) + tile.overhead * layout.num_items) // num_ctas))


def test_contexts_of_one_length_are_cut_into_equal_parts_and_room_for_starts_is_none() -> None:
    lens_B = jnp.full((4,), 1022, jnp.int32)
    spec = replace(GQA, committed_len=(1022,) * 4)  # eight items of 16 blocks
    tile = mosaic_gpu.TileConfig(block=64, num_stages=2, overhead=3, num_ctas=17, slack=6)
    layout = mosaic_gpu.make_layout(spec.problem(), spec.num_pages, tile)
    assert [int(x) for x in mosaic_gpu_schedule.share_of(layout, lens_B)] == [8, 0]
    uneven = lens_B.at[0].set(700)
    share, overhead = (int(x) for x in mosaic_gpu_schedule.share_of(layout, uneven))
    assert overhead == 3
    assert share == -(-(2 * (11 + 3 * 16) + 8 * 3) // 17)


# --- what the hardware's compiler is given


def lower(spec: ArgSpec) -> str:
    inputs = make_inputs(spec, KEY)
    attention = functools.partial(mosaic_gpu.paged_attention_gpu, config=spec.config("mosaic_gpu"))
    return jax.jit(attention).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()


KERNELS = {
    "gqa": (GQA, ["paged_attention_mosaic_gpu", "paged_attention_mosaic_gpu_combine"]),
    "tree": (TREE, ["paged_attention_mosaic_gpu", "paged_attention_mosaic_gpu_combine"]),
    "wide": (WIDE, ["paged_attention_mosaic_gpu_latent", "paged_attention_mosaic_gpu_combine"]),
    "turned": (TURNED, ["paged_attention_mosaic_gpu_turned", "paged_attention_mosaic_gpu_turned_combine"]),
    "exact": (replace(TREE, dtype="float32"), ["paged_attention_mosaic_gpu_exact"]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_lowers_for_cuda_to_the_named_kernels_and_nothing_else(name: str) -> None:
    spec, kernels = KERNELS[name]
    text = lower(spec)
    assert text.count("@mosaic_gpu_v2") == len(kernels)
    assert sorted(set(re.findall(r"(paged_attention_\w+?)_mosaic_gpu\b", text))) == sorted(kernels)
    assert "stablehlo.dot" not in text
    assert "stablehlo.gather" not in text


# --- what it cannot do


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"page_size": 8}, "pages hold 8"),
        ({"page_size": 256}, "pages hold 256"),
        ({"k_channels": 80, "v_channels": 80}, "multiples of 64"),
        ({"v_channels": 1024, "k_channels": 1024}, "1024 value channels"),
        ({"num_rows": 1025}, "1025 query rows"),
        ({"k_channels": 1024, "v_channels": 256}, "1024 key channels"),
        ({"k_channels": 512, "v_channels": 512}, "only as part of them"),
    ],
)
def test_says_what_it_cannot_do(change: dict[str, object], reason: str) -> None:
    assert reason in (mosaic_gpu.supports(replace(GQA, **change).problem()) or "")


@pytest.mark.parametrize(
    "spec", [*SPECS.values(), TURNED, replace(LATENT, dtype="float32", k_channels=192, v_channels=128)]
)
def test_says_what_it_can_do(spec: ArgSpec) -> None:
    assert mosaic_gpu.supports(spec.problem()) is None


# --- faults that the tests above would find


class _NoWait:
    """Mosaic GPU in which nobody waits for barriers of so many arrivals."""

    def __init__(self, num_arrivals: int):
        self.num_arrivals = num_arrivals

    def __getattr__(self, name: str) -> object:
        return getattr(plgpu, name)

    def barrier_wait(self, barrier: Any) -> None:
        if getattr(barrier, "ref", barrier).dtype.num_arrivals != self.num_arrivals:
            plgpu.barrier_wait(barrier)


def _without_last_part(original):
    def merge(parts, lse, first, last, *where):
        return original(parts, lse, first, last - 1, *where)

    return merge


def _one_less(layout, bits, part, *where, original=mosaic_gpu_common.visible):
    return original(layout, bits, replace(part, committed_len=part.committed_len - 1), *where)


def _without_last_part_turned(layout, parts, lse, first, last, piece, original=mosaic_gpu_turned_combine._merge):
    return original(layout, parts, lse, first, last - 1, piece)


MUTANTS = {
    "pages swapped in pairs": (mosaic_gpu_common, "_aligned", lambda start, rows: start ^ rows),
    "last block not read": (
        mosaic_gpu_schedule,
        "num_blocks",
        lambda layout, length: jnp.where(length >= 0, (length + layout.num_rows) // layout.block, 0),
    ),
    "last part not merged": (mosaic_gpu_combine, "_merge_rows", _without_last_part(mosaic_gpu_combine._merge_rows)),
    "rows attend one position less": (mosaic_gpu_attend, "visible", _one_less),
    "nobody waits for keys": (mosaic_gpu_attend, "plgpu", _NoWait(4)),  # pages of a block
}
LATENT_MUTANTS = {
    "nobody waits for keys, scores or weights": (mosaic_gpu_latent, "plgpu", _NoWait(1)),
    "rows attend one position less": (mosaic_gpu_latent, "visible", _one_less),
    "values behind the last row are not zeroed": (
        mosaic_gpu_latent._Half,
        "clean",
        lambda self, part, first, zero, stage: None,
    ),
    "channels are added to their neighbours": (
        mosaic_gpu_latent._Half,
        "add_products",
        lambda self, sums, weights, values, original=mosaic_gpu_latent._Half.add_products: original(
            self, sums, weights, values[::-1]
        ),
    ),
    "the last channels are left out of the scores": (
        mosaic_gpu_pieces.Pieces,
        "span",
        lambda self, piece, original=mosaic_gpu_pieces.Pieces.span: (
            original(self, piece) if piece < self.num else (512, 0)
        ),
    ),
    "the peer's maxima are taken for one's own": (
        mosaic_gpu_latent._Half,
        "receive",
        lambda self, zero, original=mosaic_gpu_latent._Half.receive: (
            original(self, zero)[0],
            plgpu.load(self.scratch["rows_smem"].at[self.index], layout=plgpu.Layout.WGMMA.reduce(1)),
        ),
    ),
}


TURNED_MUTANTS = {
    "pages swapped in pairs": MUTANTS["pages swapped in pairs"],
    "last part not merged": (mosaic_gpu_turned_combine, "_merge", _without_last_part_turned),
    "nobody waits for keys": (mosaic_gpu_turned, "plgpu", _NoWait(4)),  # pages of a block
    "rows attend one position less": (
        mosaic_gpu_turned,
        "visible_columns",
        functools.partial(_one_less, original=mosaic_gpu_common.visible_columns),
    ),
    "values behind the last row are not zeroed": (
        mosaic_gpu_turned._Consumer,
        "clean",
        lambda self, part, first, stage, carry: carry,
    ),
    "the last channels are left out of the scores": (
        mosaic_gpu_turned._Consumer,
        "queries",
        lambda self, piece, original=mosaic_gpu_turned._Consumer.queries: original(self, jnp.minimum(piece, 7)),
    ),
}


EXACT_MUTANTS = {
    "rows attend one position less": (
        mosaic_gpu_exact,
        "_attend_block",
        lambda layout, scratch, block, base, *rest, original=mosaic_gpu_exact._attend_block: original(
            layout, scratch, block, base - 1, *rest
        ),
    ),
    "every block is the first": (
        mosaic_gpu_exact,
        "_load_block",
        lambda *where, original=mosaic_gpu_exact._load_block: original(*where[:-1], where[-1] * 0),
    ),
    "nobody waits for keys": (mosaic_gpu_exact, "plgpu", _NoWait(4)),  # two pages, of keys and of values
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, interpreter_reset: None) -> None:
    owner, attribute, fault = MUTANTS[name]
    spec = replace(GQA, committed_len=(70, 5), num_q_heads=4)
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises((AssertionError, RuntimeError)):
        check(functools.partial(run, num_ctas=5), spec, make_inputs(spec, KEY))  # five: the first item is cut


@pytest.mark.parametrize("name", LATENT_MUTANTS)
def test_a_fault_of_the_latent_kernel_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, interpreter_reset: None
) -> None:
    monkeypatch.setattr(*LATENT_MUTANTS[name])
    spec = replace(WIDE, committed_len=(150,))  # two blocks
    with pytest.raises((AssertionError, RuntimeError)):
        check(functools.partial(run, num_ctas=1), spec, make_inputs(spec, KEY))


@pytest.mark.parametrize("name", TURNED_MUTANTS)
def test_a_fault_of_the_turned_kernel_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, interpreter_reset: None
) -> None:
    monkeypatch.setattr(*TURNED_MUTANTS[name])
    spec = replace(TURNED, committed_len=(150,), page_size=16)  # three blocks, cut in two
    with pytest.raises((AssertionError, RuntimeError)):
        check(functools.partial(run, num_ctas=2), spec, make_inputs(spec, KEY))


@pytest.mark.parametrize("name", EXACT_MUTANTS)
def test_a_fault_of_the_float32_kernel_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, interpreter_reset: None
) -> None:
    monkeypatch.setattr(*EXACT_MUTANTS[name])
    spec = replace(GQA, committed_len=(70,), num_q_heads=1, num_kv_heads=1, page_size=32, dtype="float32")
    with pytest.raises((AssertionError, RuntimeError)):
        check(run, spec, make_inputs(spec, KEY))
