"""What a benchmark case is run on: lengths, page tables, trees, drawn from a seed."""

import numpy as np

from kernels_pallas.bench_cases import Case


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
