"""The streamed linear product by backend name: checks the call, never falls back in silence."""

import jax
import jax.numpy as jnp

from kernels_pallas.streamed_linear import mosaic_gpu, reference
from kernels_pallas.streamed_linear.contract import PLAIN, Backend, Form, Problem

BACKENDS: dict[str, Backend] = {
    "xla": Backend(reference.linear_reference, reference.supports),
    "mosaic_gpu": Backend(mosaic_gpu.linear_gpu, mosaic_gpu.supports),
}


def streamed_linear(
    x_RD: jax.Array,
    w: jax.Array,
    *,
    backend: str,
    form: Form = PLAIN,
    norm_weight_D: jax.Array | None = None,
    residual_RN: jax.Array | None = None,
) -> jax.Array:
    """`x @ w` with what surrounds it: [R, N] in `form.out_dtype`. See `contract`.

    Raises `ValueError` for arrays that do not fit together or an unknown backend, and `NotImplementedError`, with the
    limit, for a problem that the backend cannot do.

    >>> x = jnp.ones((1, 2), "bfloat16"); w = jnp.asarray([[1, 2, 3], [1, 2, 3]], "bfloat16")
    >>> streamed_linear(x, w, backend="xla", residual_RN=jnp.ones((1, 3), "bfloat16")).tolist()
    [[3.0, 5.0, 7.0]]
    """
    if x_RD.ndim != 2 or w.ndim != 2 or 0 in x_RD.shape or 0 in w.shape:
        raise ValueError(f"x has shape {x_RD.shape} and w {w.shape}; they must be matrices with at least one element.")
    if x_RD.shape[1] != w.shape[1 if form.is_out_major else 0]:
        order = "[out, channels]" if form.is_out_major else "[channels, out]"
        raise ValueError(f"x has shape {x_RD.shape} and w {w.shape}; they must be [rows, channels] and {order}.")
    if x_RD.dtype != w.dtype or not jnp.issubdtype(x_RD.dtype, jnp.floating):
        raise ValueError(f"x is {x_RD.dtype} and w {w.dtype}; they must be one floating-point type.")
    if form.is_gated and w.shape[0 if form.is_out_major else 1] % 2:
        raise ValueError(f"w has shape {w.shape}; gated weights must have as many ups as gates.")
    problem = Problem.of(form, x_RD, w, residual_RN)
    if (norm_weight_D is None) != (form.norm_eps is None):
        raise ValueError("A norm needs both its weight and form.norm_eps; one of them is missing.")
    if norm_weight_D is not None and (norm_weight_D.shape != x_RD.shape[1:] or norm_weight_D.dtype != x_RD.dtype):
        raise ValueError(
            f"norm_weight is {norm_weight_D.dtype}{list(norm_weight_D.shape)}; "
            f"it must be {x_RD.dtype}[{x_RD.shape[1]}]."
        )
    if residual_RN is not None:
        shape = (problem.num_rows, problem.out_channels)
        if residual_RN.shape != shape or residual_RN.dtype != x_RD.dtype:
            raise ValueError(
                f"residual is {residual_RN.dtype}{list(residual_RN.shape)}; it must be {x_RD.dtype}{list(shape)}."
            )
    reason = supports(backend, problem)
    if reason is not None:
        raise NotImplementedError(f"streamed linear backend {backend!r} cannot do this: {reason}")
    return BACKENDS[backend].run(form, x_RD, w, norm_weight_D, residual_RN)


def supports(backend: str, problem: Problem) -> str | None:
    """Why the backend cannot do the problem, or None if it can. Nothing is run. `ValueError`: no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f"streamed linear backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}.")
    return BACKENDS[backend].supports(problem)
