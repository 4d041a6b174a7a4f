"""A family whose products, or those of its experts, are a named backend's."""

from dataclasses import replace

import jax.numpy as jnp

from kernels_pallas.grouped_matmul import BACKENDS, supports
from kernels_pallas.grouped_matmul.contract import Problem
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.linear import XLA, check_linear_backend, problem_with
from mtp_jax.models.moe import MoeConfig
from mtp_jax.models.with_drafter import WithDrafter


def with_moe_backend(family: ModelFamily, backend: str, dtype: jnp.dtype) -> ModelFamily:
    """The family with the backend in its layers. `ConfigError`: no such backend, or it cannot do these experts."""
    if backend not in BACKENDS:
        raise ConfigError(f"moe_backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}.")
    if backend == "reference":
        return family
    if isinstance(family, WithDrafter):
        return replace(family, target=with_moe_backend(family.target, backend, dtype))
    if not isinstance(family, MtpDecoder) or family.moe is None:
        raise ConfigError(f"moe_backend is {backend!r}, but this model has no experts; leave it at 'reference'.")
    _check(family.hidden_size, family.moe, backend, dtype)
    return replace(family, moe=replace(family.moe, backend=backend))


def with_linear_backend(family: ModelFamily, backend: str, dtype: jnp.dtype) -> ModelFamily:
    """The family with the backend in its products. `ConfigError`: no such backend, or it cannot do these weights."""
    check_linear_backend(backend)
    if backend == XLA:
        return family
    if isinstance(family, WithDrafter):
        return replace(family, target=with_linear_backend(family.target, backend, dtype))
    if not isinstance(family, MtpDecoder):
        raise ConfigError(f"linear_backend is {backend!r}, which this model has not; leave it at {XLA!r}.")
    for in_channels, out_channels in ((family.hidden_size, family.ffn_size), (family.ffn_size, family.vocab_size)):
        reason = problem_with(backend, in_channels, out_channels, dtype.name)
        if reason is not None:
            raise ConfigError(f"linear_backend {backend!r} cannot do this model's products: {reason}")
    return replace(family, linear_backend=backend)


def _check(hidden_size: int, moe: MoeConfig, backend: str, dtype: jnp.dtype) -> None:
    for in_channels, out_channels in ((hidden_size, 2 * moe.expert_ffn_size), (moe.expert_ffn_size, hidden_size)):
        reason = supports(backend, Problem(1, moe.num_experts, in_channels, out_channels, jnp.dtype(dtype).name))
        if reason is not None:
            raise ConfigError(f"moe_backend {backend!r} cannot do this model's experts: {reason}")
