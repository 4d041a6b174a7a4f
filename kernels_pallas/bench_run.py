"""One case of the kernel benchmark, in its own process: compiles, then takes the GPU for itself."""

import functools
import time
import traceback
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.bench_cases import Case
from kernels_pallas.bench_draws import draw_lengths, draw_tables, draw_tree
from kernels_pallas.bench_gpu import Gpu, device_times, median_time
from kernels_pallas.paged_attention import mosaic_gpu
from kernels_pallas.paged_attention.contract import PagedAttentionConfig
from kernels_pallas.paged_attention.mosaic_gpu_tile import tuned_tile
from kernels_pallas.paged_attention.reference import paged_attention_reference

_CALLS = 12  # kernel calls in one timed program
_NUM_RANDOM = 17  # random draws a check makes


def run_case(case: Case, lock: str) -> dict:
    """The case's numbers, or {"error": why}."""
    name = case.name
    try:
        if case.kind == "peer":
            from kernels_pallas.bench_peer import measure_peer  # needs packages that only it needs

            return {"name": name, **measure_peer(case, lock)}
        return {"name": name, **_KINDS[case.kind](case, lock)}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {str(error)[:600]}"}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def attention(case: Case):
    """The kernel bound to the case's tile, jitted; and its configuration."""
    config = PagedAttentionConfig("mosaic_gpu", scale=_scale(case), v_channels=case.v_channels)
    problem = case.problem()
    reason = mosaic_gpu.supports(problem)
    if reason is not None:
        raise NotImplementedError(reason)
    tile = replace(tuned_tile(problem, jax.devices()[0].device_kind), **dict(case.tile))

    @jax.jit
    def run(q, k, v, table, lengths, bits):
        return mosaic_gpu.paged_attention_gpu(q, k, v, table, lengths, bits, config=config, tile=tile)

    return run, config, tile


def _scale(case: Case) -> float:
    return (192 if case.k_channels == 576 else case.k_channels) ** -0.5


def _shapes(case: Case, num_pages: int):
    dtype = jnp.dtype(case.dtype)
    pages = (num_pages, case.page_size, case.num_kv_heads)
    return (
        jax.ShapeDtypeStruct((case.num_slots, case.num_rows, case.num_q_heads, case.k_channels), dtype),
        jax.ShapeDtypeStruct((*pages, case.k_channels), dtype),
        None if case.is_latent else jax.ShapeDtypeStruct((*pages, case.v_channels), dtype),
        jax.ShapeDtypeStruct((case.num_slots, case.pages_per_slot), jnp.int32),
        jax.ShapeDtypeStruct((case.num_slots,), jnp.int32),
        jax.ShapeDtypeStruct((case.num_slots, case.num_rows), jnp.uint32) if case.is_tree else None,
    )


def compare(
    out: np.ndarray, expected: np.ndarray, spread: np.ndarray | None = None, dtype: str = "bfloat16"
) -> tuple[bool, float, float]:
    """(right, largest error, cosine distance).

    Right: each element within 8e-4 or 2.01/128 of its own size, and the cosine distance below 5e-6. Short contexts and
    peaked scores need more: weights and output are rounded to bf16, each by 2^-9 at most, so an element may be off by
    2^-8 of `spread`, the attention over absolute values. In float32, where weights and output are not rounded, the
    scores are what is off, by 2^-19 of their size (up to 60): 2^-13 of `spread`, and nothing else is let pass.
    """
    out, expected = out.astype(np.float64), expected.astype(np.float64)
    error = np.abs(out - expected)
    if dtype == "float32":
        if spread is None:
            raise ValueError("float32 outputs are judged by the spread of their values; give it.")
        is_near = error <= 2.0**-13 * spread
    else:
        is_near = (error <= 8e-4) | (error <= np.abs(expected) * (2.01 / 128))
        if spread is not None:
            is_near |= error <= 2.0**-8 * spread
    is_near = bool(np.all(is_near))
    norm = (out * out).sum() + (expected * expected).sum()
    cosine = 1 - 2 * (out * expected).sum() / norm if norm else 0.0
    return is_near and cosine < 5e-6, float(error.max()), float(cosine)


def check(case: Case, lock: str) -> dict:
    """Random draws against the float32 reference: every unused position and page NaN, peaked scores, edge lengths."""
    run, config, tile = attention(case)
    num_pages = case.num_slots * (case.pages_per_slot) + 1
    start = time.monotonic()
    compiled = run.lower(*_shapes(case, num_pages)).compile()
    compile_s = time.monotonic() - start
    q, k, v, *rest = _shapes(case, num_pages)
    q = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    absolute = v or jax.ShapeDtypeStruct((*k.shape[:3], case.v_channels), k.dtype)
    expect = jax.jit(functools.partial(paged_attention_reference, config=config))
    expect_values = expect.lower(q, k, v, *rest).compile()
    expect_spread = expect.lower(q, k, absolute, *rest).compile()
    right, worst, worst_cosine, first_wrong = 0, 0.0, 0.0, ""
    with Gpu(lock):
        for seed in range(_NUM_RANDOM):
            arrays = _poisoned(case, num_pages, seed)
            out = np.asarray(compiled(*arrays).astype(jnp.float32))
            q, k, v, *rest = arrays
            expected = np.asarray(expect_values(q.astype(jnp.float32), k, v, *rest))
            values = k[..., : case.v_channels] if v is None else v
            spread = expect_spread(q.astype(jnp.float32), k, jnp.abs(values), *rest)
            is_right, error, cosine = compare(out, expected, np.asarray(spread), case.dtype)
            right += int(is_right)
            worst, worst_cosine = max(worst, error), max(worst_cosine, cosine)
            if not is_right and not first_wrong:
                by_slot = np.abs(out - expected).max(axis=(1, 2, 3))
                first_wrong = f"seed {seed}: lengths {np.asarray(arrays[4]).tolist()}, error a slot {by_slot.tolist()}"
    result = {"num_right": right, "num_cases": _NUM_RANDOM, "max_error": worst, "max_cosine": worst_cosine}
    result |= {"compile_s": compile_s, "tile": str(tile)}
    if first_wrong:
        result["error"] = f"wrong in {_NUM_RANDOM - right} of {_NUM_RANDOM}; {first_wrong}"
    return result


def _poisoned(case: Case, num_pages: int, seed: int) -> tuple:
    lengths = draw_lengths(case, seed)
    table, _ = draw_tables(case, lengths, seed)
    is_used = np.zeros((num_pages, case.page_size), bool)
    for slot, length in enumerate(lengths):
        for position in range(length + case.num_rows if length >= 0 else 0):
            is_used[table[slot, position // case.page_size], position % case.page_size] = True

    def pages(channels: int, key: int) -> jax.Array:
        values = _normal(
            jax.random.key(seed * 7 + key), (num_pages, case.page_size, case.num_kv_heads, channels), case.dtype
        )
        return jnp.where(is_used[:, :, None, None], values, jnp.nan)

    sharpness = (1.0, 4.0, 12.0)[seed % 3]  # peaked softmax makes the parts of a cut item differ in their maxima
    q = _normal(jax.random.key(seed * 7), _shapes(case, num_pages)[0].shape, case.dtype) * sharpness
    return (
        q,
        pages(case.k_channels, 1),
        None if case.is_latent else pages(case.v_channels, 2),
        jnp.asarray(table),
        jnp.asarray(lengths),
        jnp.asarray(draw_tree(case, seed)) if case.is_tree else None,
    )


def measure(case: Case, lock: str) -> dict:
    """Median time of a call, the bytes of context over it, its operations over it, and its error on three slots."""
    run, config, tile = attention(case)
    lengths = draw_lengths(case, 0)
    table, num_pages = draw_tables(case, lengths, 1)
    start = time.monotonic()

    @jax.jit
    def program(queries, sets, table, lengths):
        # Calls with queries of their own cannot be merged; on one GPU they run one after the other.
        return [run(q, *sets[call % len(sets)], table, lengths, None) for call, q in enumerate(queries)]

    q, k, v, table_shape, lengths_shape, _ = _shapes(case, num_pages)
    context_bytes = (k.size + (0 if v is None else v.size)) * 2
    num_sets = 3 if context_bytes > 200e6 else 6
    single = run.lower(q, k, v, table_shape, lengths_shape, None).compile()
    compiled = program.lower([q] * _CALLS, [(k, v)] * num_sets, table_shape, lengths_shape).compile()
    compile_s = time.monotonic() - start
    total = int((lengths + case.num_rows).sum())
    num_bytes = total * 2 * case.num_kv_heads * (case.k_channels + (0 if case.is_latent else case.v_channels))
    num_pairs = int((lengths * case.num_rows).sum()) + case.num_slots * case.num_rows * (case.num_rows + 1) // 2
    num_ops = 2 * num_pairs * case.num_q_heads * (case.k_channels + case.v_channels)
    with Gpu(lock):
        queries = [_normal(jax.random.key(call), q.shape) for call in range(_CALLS)]
        sets = [
            tuple(
                None if a is None else _normal(jax.random.key(100 + 10 * i + j), a.shape) for j, a in enumerate((k, v))
            )
            for i in range(num_sets)
        ]
        arrays = (jnp.asarray(table), jnp.asarray(lengths))
        out = np.asarray(single(queries[0], *sets[0], *arrays, None).astype(jnp.float32))
        is_right, max_error, cosine = _check_slots(config, (queries[0], *sets[0]), *arrays, out)
        seconds = median_time(lambda: compiled(queries, sets, *arrays)) / _CALLS
        kernels = device_times(lambda: compiled(queries, sets, *arrays), _CALLS)
    us = sum(kernels.values())
    result = {
        "us": us,
        "host_us": seconds * 1e6,
        "device": jax.devices()[0].device_kind,
        "TBps": num_bytes / us / 1e6,
        "TFLOPs": num_ops / us / 1e6,
        "max_error": max_error,
        "cosine": cosine,
        "kernels": kernels,
        "compile_s": compile_s,
        "tile": str(tile),
    }
    if not is_right:
        result["error"] = f"wrong: largest error {max_error}, cosine distance {cosine}; {us:.1f} us {kernels}"
    return result


def _check_slots(config, arrays, table, lengths, out):
    q, k, v = arrays
    slots = np.array(sorted({0, int(np.argmin(lengths)), int(np.argmax(lengths))}))
    expect = jax.jit(functools.partial(paged_attention_reference, config=config))
    rest = (table[slots], lengths[slots], None)
    q_float32 = q[slots].astype(jnp.float32)
    expected = expect(q_float32, k, v, *rest)
    spread = expect(q_float32, k, jnp.abs(k[..., : config.v_channels] if v is None else v), *rest)
    return compare(out[slots], np.asarray(expected), np.asarray(spread))


def measure_ceilings(case: Case, lock: str) -> dict:  # noqa: ARG001 - of the card
    """The card's own rates: copy (bytes read and written, the better of two ways) and a bf16 matrix product."""
    elements = 1 << 29  # 2 GiB of float32
    product = jax.jit(lambda a, b: a @ b)
    with Gpu(lock):
        x = _normal(jax.random.key(0), (elements // 4096, 4096), "float32")
        copies = {}
        for name, copy in {"add": jax.jit(lambda x: x + 1), "copy": jax.jit(jnp.copy)}.items():
            median_time(lambda copy=copy: copy(x), groups=1)
            copies[name] = 8 * elements / sum(device_times(lambda copy=copy: copy(x), 1, groups=5).values()) / 1e6
        a, b = (_normal(jax.random.key(i), (8192, 8192)) for i in (1, 2))
        product_s = median_time(lambda: product(a, b))
        product_us = sum(device_times(lambda: product(a, b), 1, groups=5).values())
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_TBps": round(max(copies.values()), 3),
        "copies": {name: round(rate, 3) for name, rate in copies.items()},
        "matmul_TFLOPs": round(2 * 8192**3 / product_us / 1e6, 1),
        "matmul_in_a_row_TFLOPs": round(2 * 8192**3 / product_s / 1e12, 1),
    }


def measure_write(case: Case, lock: str) -> dict:
    """The write of a step's new rows into the pools, as XLA's scatter: what a kernel that writes them would save."""
    lengths = draw_lengths(case, 0)
    table, num_pages = draw_tables(case, lengths, 1)
    position = lengths[:, None] + np.arange(case.num_rows)
    ids = np.take_along_axis(table, position // case.page_size, axis=1)
    _, k, v, *_ = _shapes(case, num_pages)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(pools, rows, ids, offsets):
        return [pool.at[ids, offsets].set(row, mode="drop") for pool, row in zip(pools, rows, strict=True)]

    shapes = [shape for shape in (k, v) if shape is not None] * 2
    with Gpu(lock):
        pools = [_normal(jax.random.key(i), shape.shape) for i, shape in enumerate(shapes)]
        rows = [_normal(jax.random.key(9), (*position.shape, *shape.shape[2:])) for shape in shapes]
        addresses = jnp.asarray(ids), jnp.asarray(position % case.page_size)

        def call():
            pools[:] = program(pools, rows, *addresses)
            return pools

        seconds = median_time(call) / 2
        kernels = device_times(call, 2)
    us = sum(kernels.values())
    num_bytes = 2 * sum(row.nbytes for row in rows) // 2
    return {"us": us, "host_us": seconds * 1e6, "TBps": num_bytes / us / 1e6, "TFLOPs": 0.0, "max_error": 0.0} | {
        "kernels": kernels
    }


def measure_dense(case: Case, lock: str) -> dict:
    """cuDNN through `jax.nn` on a chunk's rows, with keys and values side by side: no pages, all rows see all keys.

    Where the chunk is the whole context, causally.
    """
    is_whole = case.context == case.num_rows
    shape = (case.num_slots, case.context, case.num_kv_heads, case.k_channels)
    queries = (case.num_slots, case.num_rows, case.num_q_heads, case.k_channels)

    @jax.jit
    def program(q, k, v):
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_whole, implementation="cudnn")
        return [attend(x, k, v) for x in q]

    with Gpu(lock):
        q = [_normal(jax.random.key(i), queries) for i in range(4)]
        k, v = (_normal(jax.random.key(10 + i), shape) for i in range(2))
        seconds = median_time(lambda: program(q, k, v)) / 4
        kernels = device_times(lambda: program(q, k, v), 4)
    us = sum(kernels.values())
    num_pairs = case.num_slots * case.num_rows * ((case.num_rows + 1) / 2 if is_whole else case.context)
    num_ops = 2 * num_pairs * case.num_q_heads * (case.k_channels + case.v_channels)
    return {"us": us, "host_us": seconds * 1e6, "TBps": 2 * k.nbytes / us / 1e6, "TFLOPs": num_ops / us / 1e6} | {
        "max_error": 0.0,
        "kernels": kernels,
    }


_KINDS = {
    "check": check,
    "time": measure,
    "ceilings": measure_ceilings,
    "write": measure_write,
    "dense": measure_dense,
}
