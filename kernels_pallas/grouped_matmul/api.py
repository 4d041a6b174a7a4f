"""Grouped matmul by backend name: checks the call, never falls back in silence."""

import jax
import jax.numpy as jnp

from kernels_pallas.grouped_matmul import mosaic_gpu, reference
from kernels_pallas.grouped_matmul.contract import Backend, Problem

BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.grouped_matmul_reference, reference.supports),
    "mosaic_gpu": Backend(mosaic_gpu.grouped_matmul_gpu, mosaic_gpu.supports),
}


def grouped_matmul(x_PD: jax.Array, w_XDF: jax.Array, num_rows_X: jax.Array, *, backend: str) -> jax.Array:
    """Each row times its expert's weights: [P, F] in x's dtype. See `contract`.

    Raises `ValueError` for arrays that do not fit together or an unknown backend, and `NotImplementedError`, with the
    limit, for a problem that the backend cannot do.

    >>> x = jnp.ones((3, 2)); w = jnp.stack([jnp.ones((2, 4)), 2 * jnp.ones((2, 4))])
    >>> grouped_matmul(x, w, jnp.array([1, 2]), backend="reference")[:, 0].tolist()
    [2.0, 4.0, 4.0]
    """
    if x_PD.ndim != 2 or w_XDF.ndim != 3 or 0 in x_PD.shape or 0 in w_XDF.shape or x_PD.shape[1] != w_XDF.shape[1]:
        raise ValueError(
            f"x has shape {x_PD.shape} and w {w_XDF.shape}; they must be [rows, channels] and [experts, channels, out]."
        )
    if num_rows_X.shape != w_XDF.shape[:1]:
        raise ValueError(f"num_rows has shape {num_rows_X.shape}; it must be [{w_XDF.shape[0]}], one for each expert.")
    if not jnp.issubdtype(num_rows_X.dtype, jnp.signedinteger):
        raise ValueError(f"num_rows has dtype {num_rows_X.dtype}; it must be a signed integer type.")
    if x_PD.dtype != w_XDF.dtype or not jnp.issubdtype(x_PD.dtype, jnp.floating):
        raise ValueError(f"x is {x_PD.dtype} and w {w_XDF.dtype}; they must be one floating-point type.")
    reason = supports(backend, Problem.of(x_PD, w_XDF))
    if reason is not None:
        raise NotImplementedError(f"grouped matmul backend {backend!r} cannot do this: {reason}")
    return BACKENDS[backend].run(x_PD, w_XDF, num_rows_X)


def supports(backend: str, problem: Problem) -> str | None:
    """Why the backend cannot do the problem, or None if it can. Nothing is run. `ValueError`: no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f"grouped matmul backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}.")
    return BACKENDS[backend].supports(problem)
