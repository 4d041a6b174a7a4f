"""One case of the kernel benchmark, in its own process: compiles, then takes the GPU for itself."""

import fcntl
import functools
import glob
import signal
import statistics
import tempfile
import time
import traceback
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.bench_cases import Case
from kernels_pallas.paged_attention import mosaic_gpu
from kernels_pallas.paged_attention.contract import PagedAttentionConfig
from kernels_pallas.paged_attention.mosaic_gpu_tile import tuned_tile
from kernels_pallas.paged_attention.reference import paged_attention_reference

_GPU_SECONDS = 45  # longer than any case takes: what is still on the GPU then, hangs
_CALLS = 12  # kernel calls in one timed program
_NUM_RANDOM = 17  # random draws a check makes


def run_case(case: Case, lock: str) -> dict:
    """The case's numbers, or {"error": why}."""
    name = case.name
    try:
        if case.kind == "ceilings":
            return {"name": name, **measure_ceilings(lock)}
        return {"name": name, **(check(case, lock) if case.kind == "check" else measure(case, lock))}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {str(error)[:600]}"}


class _Gpu:
    """The GPU, for one process at a time. A process that stays too long is ended by its own alarm."""

    def __init__(self, path: str):
        self.path = path

    def __enter__(self):
        self.file = open(self.path, "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        signal.alarm(_GPU_SECONDS)

    def __exit__(self, *_):
        signal.alarm(0)
        self.file.close()


def draw_lengths(case: Case, seed: int) -> np.ndarray:
    """Committed lengths: all equal, log-uniform from 1/16 of the context to four times it, or every edge there is."""
    rng = np.random.default_rng(seed)
    if case.lengths == "uniform":
        return np.full(case.num_slots, case.context - case.num_rows, np.int32)
    if case.lengths == "ragged":
        lengths = np.exp(rng.uniform(np.log(case.context / 16), np.log(case.context * 4), case.num_slots))
        return np.maximum(lengths.astype(np.int32) - case.num_rows, 0)
    z, last = case.page_size, case.pages_per_slot * case.page_size - case.num_rows
    edges = [-1, 0, 1, z - 1, z, z + 1, 64, 127, 3 * z - case.num_rows, 2 * z - 1, last]
    lengths = np.array([*edges, *rng.integers(0, last, case.num_slots)])[: case.num_slots] if seed == 0 else None
    if lengths is None:
        lengths = np.where(rng.random(case.num_slots) < 0.15, -1, rng.integers(0, last + 1, case.num_slots))
    return np.clip(lengths, -1, last).astype(np.int32)


def draw_tables(case: Case, lengths: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    """(page table, number of pages): pages in random order; entries that no position needs name no page at all."""
    pages_per_slot = case.pages_per_slot
    needed = np.where(lengths >= 0, -(-(lengths + case.num_rows) // case.page_size), 0)
    rng = np.random.default_rng(seed)
    ids = rng.permutation(int(needed.sum())) + 1
    table = rng.integers(-5, 0, (case.num_slots, pages_per_slot)).astype(np.int32)
    taken = 0
    for slot, count in enumerate(needed):
        table[slot, :count] = ids[taken : taken + count]
        taken += count
    return table, int(needed.sum()) + 1


def draw_tree(case: Case, seed: int) -> np.ndarray:
    """Ancestor bits of one random tree a slot."""
    rng = np.random.default_rng(seed)
    bits = np.zeros((case.num_slots, case.num_rows), np.uint32)
    for slot in range(case.num_slots):
        for row in range(case.num_rows):
            parent = bits[slot, rng.integers(0, row)] if row else np.uint32(0)
            bits[slot, row] = np.uint32(1 << row) | parent
    return bits


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
    with _Gpu(lock):
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
    num_ops = 2 * total * case.num_rows * case.num_q_heads * (case.k_channels + case.v_channels)
    with _Gpu(lock):
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
    device_us = sum(kernels.values()) if isinstance(kernels, dict) else None
    result = {
        "us": seconds * 1e6,
        "device_us": device_us,
        "device": jax.devices()[0].device_kind,
        "TBps": num_bytes / seconds / 1e12,
        "TFLOPs": num_ops / seconds / 1e12,
        "max_error": max_error,
        "cosine": cosine,
        "kernels": kernels,
        "compile_s": compile_s,
        "tile": str(tile),
    }
    if not is_right:
        result["error"] = (
            f"wrong: largest error {max_error}, cosine distance {cosine}; {seconds * 1e6:.1f} us {kernels}"
        )
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


_REPEATS = 20  # programs launched back to back: the wait for the last one is a hundredth of them


def median_time(call, groups: int = 5, warm: int = 2) -> float:
    """Seconds that a call of a compiled program takes, many of them in a row."""
    for _ in range(warm):
        jax.block_until_ready(call())
    times = []
    for _ in range(groups):
        start = time.perf_counter()
        for _ in range(_REPEATS):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / _REPEATS)
    return statistics.median(times)


def device_times(call, num_calls: int) -> dict | str:
    """Microseconds a kernel call by kernel, from the profiler; a sentence if it cannot say."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(call())
            [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            totals: dict[str, float] = {}
            for plane in jax.profiler.ProfileData.from_file(file).planes:
                if "/device:GPU" not in plane.name:
                    continue
                for line in plane.lines:
                    if not line.name.startswith("Stream"):
                        continue
                    for event in line.events:
                        totals[event.name[:40]] = totals.get(event.name[:40], 0.0) + event.duration_ns / 1e3
        return {name: round(us / num_calls, 2) for name, us in sorted(totals.items(), key=lambda kv: -kv[1])[:6]}
    except Exception as error:
        return f"no profile: {type(error).__name__}: {str(error)[:100]}"


def measure_ceilings(lock: str) -> dict:
    """The card's own rates: copy (bytes read and written) and a bf16 matrix product."""
    elements = 1 << 29  # 2 GiB of float32
    copy = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda a, b: a @ b)
    with _Gpu(lock):
        x = _normal(jax.random.key(0), (elements // 4096, 4096), "float32")
        copy_s = median_time(lambda: copy(x))
        a, b = (_normal(jax.random.key(i), (8192, 8192)) for i in (1, 2))
        product_s = median_time(lambda: product(a, b))
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_TBps": round(8 * elements / copy_s / 1e12, 3),
        "matmul_TFLOPs": round(2 * 8192**3 / product_s / 1e12, 1),
    }
