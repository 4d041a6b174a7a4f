"""Paged attention by backend name: checks the call, never falls back in silence."""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention.contract import Backend, PagedAttentionConfig, Problem

BACKENDS: dict[str, Backend] = {
    "reference": Backend("reference", reference.paged_attention_reference, reference.supports, True),
}


def paged_attention(
    q_BWHC: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None = None,
    *,
    config: PagedAttentionConfig,
) -> jax.Array:
    """Attention of W query rows a slot over its pages: [B, W, H, v_channels] in q's dtype. See `contract`.

    Raises `ValueError` for arrays that do not fit together or an unknown backend, `NotImplementedError` (with the limit)
    for a shape that the backend cannot do.

    >>> q = jnp.ones((1, 1, 2, 4)); pages = jnp.ones((2, 8, 1, 4))
    >>> config = PagedAttentionConfig(backend="reference", scale=1.0, v_channels=4)
    >>> paged_attention(q, pages, pages, jnp.array([[1]]), jnp.array([3]), config=config).shape
    (1, 1, 2, 4)
    """
    check_static(q_BWHC, k_pages, v_pages, page_table_BP, committed_len_B, ancestor_bits_BW, config)
    problem = Problem.of(q_BWHC, k_pages, v_pages, page_table_BP, ancestor_bits_BW, config)
    reason = supports(config.backend, problem)
    if reason is not None:
        raise NotImplementedError(f"paged attention backend {config.backend!r} cannot do this: {reason}")
    if config.debug:
        _report_bad_pages(page_table_BP, committed_len_B, k_pages, q_BWHC.shape[1])
    return BACKENDS[config.backend].run(
        q_BWHC, k_pages, v_pages, page_table_BP, committed_len_B, ancestor_bits_BW, config=config
    )


def supports(backend: str, problem: Problem) -> str | None:
    """Why the backend cannot do the problem, or None if it can. Nothing is run."""
    if backend not in BACKENDS:
        raise ValueError(f"attention backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}.")
    return BACKENDS[backend].supports(problem)


def select_backend(name: str, platform: str) -> str:
    """`name` itself, checked; for "auto" the backend meant for the platform ("cpu", "gpu", "tpu")."""
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(
                f"attention backend is {name!r}; it must be 'auto' or one of {', '.join(map(repr, BACKENDS))}."
            )
        return name
    return _AUTO.get(platform, "reference")


_AUTO: dict[str, str] = {}


def check_static(
    q_BWHC: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table_BP: jax.Array,
    committed_len_B: jax.Array,
    ancestor_bits_BW: jax.Array | None,
    config: PagedAttentionConfig,
) -> None:
    """Raises `ValueError`, naming the array, if shapes or dtypes do not fit together."""
    if q_BWHC.ndim != 4:
        raise ValueError(f"q has shape {q_BWHC.shape}; it must be [slots, rows, heads, channels].")
    num_slots, num_rows, num_heads, k_channels = q_BWHC.shape
    if k_pages.ndim != 4 or k_pages.shape[3] != k_channels:
        raise ValueError(f"k_pages has shape {k_pages.shape}; it must be [pages, positions, heads, {k_channels}].")
    if num_heads % k_pages.shape[2] != 0:
        raise ValueError(f"{num_heads} query heads do not divide over {k_pages.shape[2]} key heads.")
    if v_pages is None:
        if not 0 < config.v_channels <= k_channels:
            raise ValueError(f"v_channels is {config.v_channels}; latent values are 1..{k_channels} channels of the keys.")
        if k_pages.shape[2] != 1:
            raise ValueError(f"latent pages have one head; k_pages has {k_pages.shape[2]}.")
    elif v_pages.shape != (*k_pages.shape[:3], config.v_channels):
        raise ValueError(f"v_pages has shape {v_pages.shape}; it must be {(*k_pages.shape[:3], config.v_channels)}.")
    if page_table_BP.ndim != 2 or page_table_BP.shape[0] != num_slots:
        raise ValueError(f"page_table has shape {page_table_BP.shape}; it must be [{num_slots}, pages].")
    if committed_len_B.shape != (num_slots,):
        raise ValueError(f"committed_len has shape {committed_len_B.shape}; it must be [{num_slots}].")
    for name, array in (("page_table", page_table_BP), ("committed_len", committed_len_B)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be an integer type.")
    if ancestor_bits_BW is not None:
        if ancestor_bits_BW.shape != (num_slots, num_rows):
            raise ValueError(f"ancestor_bits has shape {ancestor_bits_BW.shape}; it must be [{num_slots}, {num_rows}].")
        if num_rows > 32:
            raise ValueError(f"{num_rows} rows do not fit into 32 ancestor bits.")


def _report_bad_pages(page_table_BP: jax.Array, committed_len_B: jax.Array, k_pages: jax.Array, num_rows: int) -> None:
    num_pages, page_size = k_pages.shape[:2]
    num_positions = page_table_BP.shape[1] * page_size

    def report(table: jax.Array, lengths: jax.Array) -> None:
        if ((table < 0) | (table >= num_pages)).any():
            raise ValueError(f"page_table holds a page id outside 0..{num_pages - 1}: {table}.")
        if (lengths + num_rows > num_positions).any():
            raise ValueError(f"committed_len {lengths} plus {num_rows} rows passes the table's {num_positions} positions.")

    jax.debug.callback(report, page_table_BP, committed_len_B)
