"""FlashInfer on a shape of the kernel benchmark: the same lengths, page tables and clock, in a process of its own.

It needs PyTorch with CUDA and `flashinfer-python`; what it compiles on first use is kept in FlashInfer's own cache.
"""

import statistics
from typing import Any

import numpy as np

from kernels_pallas.bench_cases import Case
from kernels_pallas.bench_draws import draw_lengths, draw_tables
from kernels_pallas.bench_gpu import Gpu

_CALLS = 12  # calls that one profile covers
_REPEATS = 3  # profiles, of which the median counts
_WORKSPACE_BYTES = 256 << 20


def measure_peer(case: Case, lock: str) -> dict[str, Any]:
    """Microseconds a call of FlashInfer's kernels by PyTorch's profiler, and its relative error on three slots."""
    import flashinfer
    import torch

    lengths = draw_lengths(case, 0) + case.num_rows  # FlashInfer counts the step's own rows
    table, num_pages = draw_tables(case, draw_lengths(case, 0), 1)
    prepare = _latent if case.is_latent else _grouped
    with Gpu(lock, seconds=300):  # its first call may compile
        call, sets, expect = prepare(case, lengths, table, num_pages)
        out = call(*sets[0]).reshape(case.num_slots, case.num_rows, case.num_q_heads, case.v_channels)
        slots = sorted({0, int(np.argmin(lengths)), int(np.argmax(lengths))})
        error = max(_relative(out[slot], expect(slot)) for slot in slots)
        profiles = [_device_times(call, sets) for _ in range(_REPEATS)]
    totals = [sum(profile.values()) for profile in profiles]
    us = statistics.median(totals)
    num_bytes = int(lengths.sum()) * 2 * case.num_kv_heads
    num_bytes *= case.k_channels + (0 if case.is_latent else case.v_channels)
    num_ops = 2 * int(lengths.sum()) * case.num_rows * case.num_q_heads * (case.k_channels + case.v_channels)
    return {
        "us": us,
        "TBps": num_bytes / us / 1e6,
        "TFLOPs": num_ops / us / 1e6,
        "max_error": error,
        "kernels": profiles[totals.index(us)],
        "versions": f"flashinfer {flashinfer.__version__}, torch {torch.__version__}",
    }


def _relative(out: Any, expected: Any) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def _device_times(call: Any, sets: list[tuple[Any, ...]]) -> dict[str, float]:
    """Microseconds a call, kernel by kernel."""
    import torch

    for arguments in sets:
        call(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for index in range(_CALLS):
            call(*sets[index % len(sets)])
        torch.cuda.synchronize()
    events = [(event.key[:40], event.self_device_time_total) for event in profile.key_averages()]
    totals: dict[str, float] = {}
    for name, us in events:
        if us > 0:
            totals[name] = totals.get(name, 0.0) + us / _CALLS
    return {name: round(us, 2) for name, us in sorted(totals.items(), key=lambda item: -item[1])}


def _indices(case: Case, lengths: np.ndarray, table: np.ndarray) -> tuple[Any, ...]:
    """(start of each slot's rows, start of its pages, page ids, fill of its last page), as FlashInfer wants them."""
    import torch

    pages = -(-lengths // case.page_size)
    ids = np.concatenate([table[slot, :count] for slot, count in enumerate(pages)])
    starts = np.concatenate([[0], np.cumsum(pages)])
    rows = np.arange(case.num_slots + 1) * case.num_rows
    last = lengths - (pages - 1) * case.page_size
    return tuple(torch.tensor(array, dtype=torch.int32, device="cuda") for array in (rows, starts, ids, last))


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _num_sets(case: Case) -> int:
    return 3 if case.num_slots * case.context > 100_000 else 6


def _grouped(case: Case, lengths: np.ndarray, table: np.ndarray, num_pages: int) -> tuple[Any, ...]:
    import flashinfer
    import torch

    rows, starts, ids, last = _indices(case, lengths, table)
    heads = (case.num_q_heads, case.num_kv_heads, case.k_channels, case.page_size)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    if case.num_rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, ids, last, *heads, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(rows, starts, ids, last, *heads, causal=True, **types)
    pages = (num_pages, case.page_size, case.num_kv_heads)
    sets = [
        (
            _random(case.num_slots * case.num_rows, case.num_q_heads, case.k_channels),
            _random(*pages, case.k_channels),
            _random(*pages, case.v_channels),
        )
        for _ in range(_num_sets(case))
    ]
    q, k, v = sets[0]

    def expect(slot: int) -> Any:
        pages_of = torch.tensor(table[slot, : -(-lengths[slot] // case.page_size)], device="cuda")
        length, group = int(lengths[slot]), case.num_q_heads // case.num_kv_heads
        keys, values = (x[pages_of].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1) for x in (k, v))
        queries = q[slot * case.num_rows : (slot + 1) * case.num_rows].float()
        scores = torch.einsum("whc,shc->hws", queries, keys) * case.k_channels**-0.5
        return torch.einsum("hws,she->whe", _softmax(scores, length), values)

    return (lambda q, k, v: wrapper.run(q, (k, v))), sets, expect


def _latent(case: Case, lengths: np.ndarray, table: np.ndarray, num_pages: int) -> tuple[Any, ...]:
    import flashinfer
    import torch

    rows, starts, ids, _ = _indices(case, lengths, table)
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    tail, scale = case.k_channels - case.v_channels, 192**-0.5
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    wrapper.plan(
        rows,
        starts,
        ids,
        counts,
        case.num_q_heads,
        case.v_channels,
        tail,
        case.page_size,
        True,
        scale,
        torch.bfloat16,
        torch.bfloat16,
    )
    num_queries = case.num_slots * case.num_rows
    sets = [
        (
            _random(num_queries, case.num_q_heads, case.v_channels),
            _random(num_queries, case.num_q_heads, tail),
            _random(num_pages, case.page_size, case.v_channels),
            _random(num_pages, case.page_size, tail),
        )
        for _ in range(_num_sets(case))
    ]
    q, q_tail, k, k_tail = sets[0]

    def expect(slot: int) -> Any:
        pages_of = torch.tensor(table[slot, : -(-lengths[slot] // case.page_size)], device="cuda")
        length, mine = int(lengths[slot]), slice(slot * case.num_rows, (slot + 1) * case.num_rows)
        keys, keys_tail = (x[pages_of].flatten(0, 1)[:length].float() for x in (k, k_tail))
        scores = torch.einsum("whc,sc->hws", q[mine].float(), keys)
        scores = (scores + torch.einsum("whc,sc->hws", q_tail[mine].float(), keys_tail)) * scale
        return torch.einsum("hws,se->whe", _softmax(scores, length), keys)

    return wrapper.run, sets, expect


def _softmax(scores_HWS: Any, length: int) -> Any:
    """Softmax over the positions that each row may attend."""
    import torch

    num_rows = scores_HWS.shape[1]
    row = torch.arange(num_rows, device="cuda")[:, None]
    position = torch.arange(length, device="cuda")[None, :]
    return scores_HWS.masked_fill(position > length - num_rows + row, float("-inf")).softmax(-1)
