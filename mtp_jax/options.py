"""An `LLM`'s options as an `EngineConfig`: what cannot be honoured is refused, by name."""

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import BACKENDS, select_backend
from mtp_jax.acceptance.registry import rule_of
from mtp_jax.core.config import CacheConfig, EngineConfig, MeshConfig, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.moe_backend import with_linear_backend, with_moe_backend
from mtp_jax.policies.registry import POLICIES
from mtp_jax.proposers.registry import check_method


def engine_config(
    family: ModelFamily,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    attention_backend: str = "auto",
    moe_backend: str = "reference",
    linear_backend: str = "xla",
    mesh: Mapping[str, int] | None = None,
    async_scheduling: bool = True,
    readback_depth: int | None = None,
    prefill_chunk: int = 256,
    enable_prefix_caching: bool = True,
    numerics: str = "fast",
    seed: int = 0,
) -> EngineConfig:
    """The engine's configuration from `LLM`'s options; what cannot be honoured is refused.

    `max_model_len`: tokens of a prompt and its answer together (None: the model's own limit). `max_num_seqs`: slots,
    so requests decoded at once. `block_size`: positions of a page; `num_kv_blocks`: pages (None: every slot can be
    full). Slots and pages are those of the whole mesh. `attention_backend`, `moe_backend`, `linear_backend`: names in
    the tables of `kernels_pallas`, for attention also "auto". `mesh`: devices by axis, such as
    `{"data": 2, "model": 4}`. `readback_depth`: launches that may be under way when the next one is made, 0 to 2
    (None: 2 on a GPU, whose steps are about as short as the host's work on them, else 1); `async_scheduling=False`
    means 0. `prefill_chunk`: most prompt tokens of a launch. `enable_prefix_caching`: prompts that begin alike share
    pages. `numerics`: "fast", the only one so far. `seed`: of requests that bring none.
    Raises `ConfigError` for a value that cannot be honoured, with what would be allowed.

    >>> from mtp_jax.testing.toy_family import ToyFamily
    >>> engine_config(ToyFamily(), {"method": "mtp"}, max_model_len=64, num_kv_blocks=9).pages_per_slot
    4
    >>> engine_config(ToyFamily(), None, async_scheduling=1)
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: async_scheduling is 1; it must be True or False.
    """
    for name, value in {"async_scheduling": async_scheduling, "enable_prefix_caching": enable_prefix_caching}.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be True or False.")
    if numerics != "fast":
        raise ConfigError(f"numerics={numerics!r} is not available in this version; leave it at 'fast'.")
    with_moe_backend(family, moe_backend, jnp.dtype("bfloat16"))  # the engine knows the dtype, and asks again
    with_linear_backend(family, linear_backend, jnp.dtype("bfloat16"))
    is_gpu = jax.default_backend() == "gpu"
    if readback_depth is None:
        readback_depth = (2 if is_gpu else 1) if async_scheduling else 0
    if isinstance(speculative_config, Mapping):
        speculative_config = speculative_from(speculative_config)
    if not isinstance(speculative_config, SpeculativeConfig | None):
        raise ConfigError(
            f"speculative_config is {speculative_config!r}; it must be None, a SpeculativeConfig or a dict."
        )
    if speculative_config is not None:
        _check_variants(speculative_config)
    limit = family.max_position_embeddings
    if isinstance(max_model_len, int) and max_model_len > limit:
        raise ConfigError(f"max_model_len is {max_model_len}; this model has max_position_embeddings={limit}.")
    config = EngineConfig(
        max_model_len=limit if max_model_len is None else max_model_len,
        max_num_seqs=max_num_seqs,
        mesh=mesh_config(mesh),
        cache=CacheConfig(page_size=block_size, num_pages=num_kv_blocks, prefix_caching=enable_prefix_caching),
        speculative=speculative_config or SpeculativeConfig(method=None),
        attention_backend=resolve_backend(attention_backend),
        moe_backend=moe_backend,
        linear_backend=linear_backend,
        prefill_chunk=prefill_chunk,
        readback_depth=readback_depth,
        seed=seed,
        greedy_programs=is_gpu,
    )
    if not async_scheduling:
        if readback_depth > 1:
            raise ConfigError(
                f"async_scheduling=False reads results at once; readback_depth={readback_depth} says otherwise."
            )
        config = replace(config, readback_depth=0)
    _check_overlap(config)
    return config


def _check_overlap(config: EngineConfig) -> None:
    """With launches in flight the host's lengths are bounds: no use to a backend that takes them from there."""
    name = config.attention_backend
    if config.readback_depth > 0 and not BACKENDS[name].supports_device_lengths:
        raise ConfigError(
            f"attention_backend {name!r} needs lengths on the host, which are known only once results are read: "
            "use async_scheduling=False."
        )


def check_option_names(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for an option that `engine_config` does not have; costs nothing, so it comes first."""
    known = [
        name for name, option in signature(engine_config).parameters.items() if option.kind is Parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise ConfigError(f"LLM has no option {name!r}; it has {', '.join(known)}.")


def mesh_config(mesh: Mapping[str, int] | None) -> MeshConfig:
    """The option `mesh` as a configuration."""
    if mesh is None:
        return MeshConfig()
    if not isinstance(mesh, Mapping) or not {*mesh} <= {"data", "model"}:
        raise ConfigError(f"mesh is {mesh!r}; it must be a dict such as {{'data': 2, 'model': 4}}.")
    return MeshConfig(**mesh)


def resolve_backend(name: str) -> str:
    """The backend of that name, or of "auto" the one meant for this machine. `ConfigError`: there is none."""
    try:
        return select_backend(name, jax.default_backend())
    except ValueError as error:  # the kernels know no error of ours
        raise ConfigError(str(error)) from error


def resolve_dtype(dtype: str) -> str | None:
    """The dtype to load in; for "auto" float32 on a CPU and the checkpoint's own (None) on accelerators."""
    if dtype == "auto":
        return "float32" if jax.default_backend() == "cpu" else None
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; it must be 'auto', 'float32', 'bfloat16' or 'float16'.")
    return dtype


def _check_variants(speculative: SpeculativeConfig) -> None:
    """Raises `ConfigError` for a name that its table lacks: the engine would say so too, but after compiling."""
    check_method(speculative)
    _ = rule_of(speculative), POLICIES[speculative.policy]


def speculative_from(options: Mapping[str, Any]) -> SpeculativeConfig:
    """The configuration with these fields. `ConfigError` for a name that it does not have."""
    known = SpeculativeConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"speculative_config has no field {name!r}; it has {', '.join(known)}.")
    speculative = SpeculativeConfig(**options)
    _check_variants(speculative)
    return speculative
