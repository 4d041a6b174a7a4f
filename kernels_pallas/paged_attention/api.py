"""Paged attention by backend name: checks the call, never falls back in silence."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kernels_pallas.paged_attention import mosaic_gpu, mosaic_tpu, reference
from kernels_pallas.paged_attention.contract import MAX_TREE_ROWS, Backend, PagedAttentionConfig, Problem

BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.paged_attention_reference, reference.supports, supports_device_lengths=True),
    "mosaic_gpu": Backend(mosaic_gpu.paged_attention_gpu, mosaic_gpu.supports, supports_device_lengths=True),
    "mosaic_tpu": Backend(mosaic_tpu.paged_attention_tpu, mosaic_tpu.supports, True, channel_multiple=mosaic_tpu.LANES),
}

_FOR_PLATFORM = {"cpu": "reference", "gpu": "reference", "tpu": "reference"}
"""What "auto" means."""


def paged_attention(
    q_BWHC: jax.Array,
    k_pages_NZGC: jax.Array,
    v_pages_NZGE: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None = None,
    *,
    config: PagedAttentionConfig,
) -> jax.Array:
    """Attention of W query rows a slot over its pages: [B, W, H, v_channels] in q's dtype. See `contract`.

    Raises `ValueError` for arrays that do not fit together or an unknown backend, `NotImplementedError` (with the
    limit) for a shape that the backend cannot do. With `config.debug` also for what is in the arrays: see
    `check_values`.

    >>> q = jnp.ones((1, 1, 2, 4)); pages = jnp.ones((2, 8, 1, 4))
    >>> config = PagedAttentionConfig(backend="reference", scale=1.0, v_channels=4)
    >>> paged_attention(q, pages, pages, jnp.array([[1]]), jnp.array([3]), config=config).shape
    (1, 1, 2, 4)
    """
    check_static(q_BWHC, k_pages_NZGC, v_pages_NZGE, page_table_BP, committed_len_B, ancestor_bits_BW, config=config)
    problem = Problem.of(q_BWHC, k_pages_NZGC, v_pages_NZGE, page_table_BP, ancestor_bits_BW, config)
    reason = supports(config.backend, problem)
    if reason is not None:
        raise NotImplementedError(f"paged attention backend {config.backend!r} cannot do this: {reason}")
    if config.debug:
        check_values(page_table_BP, committed_len_B, ancestor_bits_BW, num_pages=k_pages_NZGC.shape[0], problem=problem)
    return BACKENDS[config.backend].run(
        q_BWHC, k_pages_NZGC, v_pages_NZGE, page_table_BP, committed_len_B, ancestor_bits_BW, config=config
    )


def supports(backend: str, problem: Problem) -> str | None:
    """Why the backend cannot do the problem, or None if it can. Nothing is run. `ValueError`: no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f"attention backend is {backend!r}; it must be one of {_backend_names()}.")
    return BACKENDS[backend].supports(problem)


def select_backend(name: str, platform: str) -> str:
    """`name` itself, checked; for "auto" the backend meant for the platform ("cpu", "gpu", "tpu").

    >>> select_backend("auto", "cpu")
    'reference'
    """
    if name == "auto":
        if platform not in _FOR_PLATFORM:
            allowed = ", ".join(map(repr, _FOR_PLATFORM))
            raise ValueError(f"no attention backend is meant for platform {platform!r}; platforms are {allowed}.")
        return _FOR_PLATFORM[platform]
    if name not in BACKENDS:
        raise ValueError(f"attention backend is {name!r}; it must be 'auto' or one of {_backend_names()}.")
    return name


def check_static(
    q_BWHC: jax.Array,
    k_pages_NZGC: jax.Array,
    v_pages_NZGE: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    *,
    config: PagedAttentionConfig,
) -> None:
    """Raises `ValueError`, naming the array, if shapes or dtypes do not fit together."""
    if q_BWHC.ndim != 4 or 0 in q_BWHC.shape:
        raise ValueError(f"q has shape {q_BWHC.shape}; it must be [slots, rows, heads, channels], none of them 0.")
    num_slots, num_rows, num_heads, k_channels = q_BWHC.shape
    if k_pages_NZGC.ndim != 4 or k_pages_NZGC.shape[3] != k_channels or 0 in k_pages_NZGC.shape:
        raise ValueError(f"k_pages has shape {k_pages_NZGC.shape}; it must be [pages, positions, heads, {k_channels}].")
    if num_heads % k_pages_NZGC.shape[2] != 0:
        raise ValueError(f"{num_heads} query heads do not divide over {k_pages_NZGC.shape[2]} key heads.")
    v_shape = (*k_pages_NZGC.shape[:3], config.v_channels)
    if v_pages_NZGE is None:
        if not 0 < config.v_channels <= k_channels:
            raise ValueError(
                f"v_channels is {config.v_channels}; latent values are 1..{k_channels} channels of the keys."
            )
        if k_pages_NZGC.shape[2] != 1:
            raise ValueError(f"k_pages has {k_pages_NZGC.shape[2]} heads; latent pages (no v_pages) have 1.")
    elif v_pages_NZGE.shape != v_shape or config.v_channels < 1:
        raise ValueError(f"v_pages has shape {v_pages_NZGE.shape}; by k_pages and v_channels it must be {v_shape}.")
    if page_table_BP.ndim != 2 or page_table_BP.shape[0] != num_slots or page_table_BP.shape[1] == 0:
        raise ValueError(f"page_table has shape {page_table_BP.shape}; it must be [{num_slots}, pages of a slot].")
    if committed_len_B.shape != (num_slots,):
        raise ValueError(f"committed_len has shape {committed_len_B.shape}; it must be [{num_slots}].")
    if ancestor_bits_BW is not None:
        if ancestor_bits_BW.shape != (num_slots, num_rows):
            raise ValueError(f"ancestor_bits has shape {ancestor_bits_BW.shape}; it must be [{num_slots}, {num_rows}].")
        if ancestor_bits_BW.dtype != jnp.uint32:
            raise ValueError(f"ancestor_bits has dtype {ancestor_bits_BW.dtype}; it must be uint32.")
        if num_rows > MAX_TREE_ROWS:
            raise ValueError(f"{num_rows} rows do not fit into ancestor bits; at most {MAX_TREE_ROWS} do.")
    for name, array in (("page_table", page_table_BP), ("committed_len", committed_len_B)):
        if not jnp.issubdtype(array.dtype, jnp.signedinteger):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be a signed integer type.")
    for name, array in (("q", q_BWHC), ("k_pages", k_pages_NZGC), ("v_pages", v_pages_NZGE)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be a floating-point type.")


def check_values(
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    *,
    num_pages: int,
    problem: Problem,
) -> None:
    """Raises `ValueError` for page ids that are read and do not exist, lengths past the table, rows without own bit.

    On concrete arrays it raises at once. Inside a trace the check travels with the program as a callback to the host,
    and its sentence comes in the `JaxRuntimeError` of whatever waits for the program.
    Rows past the table are no fault: near its end a step's last rows are padding. The first row's position is.
    """
    num_positions = problem.pages_per_slot * problem.page_size

    def check(table_BP: np.ndarray, base_B: np.ndarray, *bits: np.ndarray) -> None:
        if (base_B >= num_positions).any():
            raise ValueError(f"committed_len is {base_B}; the page table ends at position {num_positions}.")
        end_B = np.where(base_B < 0, 0, np.minimum(base_B + problem.num_rows, num_positions))
        is_read_BP = np.arange(problem.pages_per_slot) * problem.page_size < end_B[:, None]
        wrong_BP = is_read_BP & ((table_BP < 0) | (table_BP >= num_pages))
        if wrong_BP.any():
            slot, entry = np.argwhere(wrong_BP)[0]
            raise ValueError(
                f"page_table[{slot}, {entry}] is page {table_BP[slot, entry]}; pages are 0..{num_pages - 1}."
            )
        for bits_BW in bits:
            is_own_BW = (bits_BW >> np.arange(problem.num_rows, dtype=np.uint32)) & 1 == 1
            if not is_own_BW[base_B >= 0].all():
                raise ValueError("ancestor_bits lacks a row's own bit; row w must have bit w.")

    arrays = [page_table_BP, committed_len_B, *([] if ancestor_bits_BW is None else [ancestor_bits_BW])]
    if any(isinstance(array, Tracer) for array in arrays):
        jax.debug.callback(lambda *traced: check(*map(np.asarray, traced)), *arrays)
    else:
        check(*map(np.asarray, arrays))


def _backend_names() -> str:
    return ", ".join(map(repr, BACKENDS))
