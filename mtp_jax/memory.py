"""Whether an engine's memory fits the device, asked before anything is allocated."""

import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.ops.kv_cache import stored_specs
from mtp_jax.proposers.registry import PROPOSERS, resolve_method

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def needed_bytes(family: ModelFamily, config: EngineConfig, dtype: jnp.dtype) -> dict[str, int]:
    """Bytes on one device by what they are for: page pools of target and drafter, page tables, a full batch's logits.

    Not all that a step takes, but all that the options of the cache and the batch can make arbitrarily large. Of logits
    at least what any compiler has to hold at once: of every row those of the target, the noise and the law that a
    request makes of them, of drawn drafts their law and the target's as probabilities; of every slot how often each
    token stands in prompt and output, and its bias. (XLA for CPUs holds about 11 arrays of all rows, 20 with 64 bad
    words to compare with: K = 3, jax 0.10.2.)
    """
    speculative = config.speculative
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine gives the same warning
        method, max_draft_len = resolve_method(speculative, family)
    specs = (*family.kv_specs(), *PROPOSERS[method].build(family, speculative).draft_kv_specs(family))
    specs = stored_specs(specs, config.attention_backend)
    num_rows = speculative.topology.num_drafts(max_draft_len) + 1
    channels = 0
    for spec in specs:
        num_heads = spec.num_kv_heads if spec.axis is None else spec.num_kv_heads // config.mesh.model
        channels += num_heads * (spec.k_channels + (spec.v_channels or 0))
    num_arrays_of_rows = 3 if speculative.draft_sampling != "probabilistic" or max_draft_len == 0 else 5
    num_positions = (config.pages_per_shard + 1) * config.cache.page_size
    return {
        "KV blocks": num_positions * channels * dtype.itemsize,
        "page tables": config.slots_per_shard * config.pages_per_slot * 4,
        "logits": config.slots_per_shard * (num_arrays_of_rows * num_rows + 3) * family.vocab_size * 4,
    }


def available_bytes(device: Any) -> int | None:
    """What the device has left, or what the host has in all where the device is its CPU; None where nothing tells."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def check_memory(family: ModelFamily, config: EngineConfig, dtype: jnp.dtype) -> None:
    """Raises `ConfigError` with both sizes if the engine needs more than the device has."""
    device = jax.local_devices()[0]
    available, needed = available_bytes(device), needed_bytes(family, config, dtype)
    if available is None or sum(needed.values()) <= available:
        return
    parts = ", ".join(f"{in_units(size)} for {what}" for what, size in needed.items())
    raise ConfigError(
        f"num_kv_blocks={config.num_pages}, block_size={config.cache.page_size}, max_num_seqs={config.max_num_seqs} "
        f"and max_model_len={config.max_model_len} need {parts}, and {device.platform.upper()} memory has "
        f"{in_units(available)}; lower them."
    )


def in_units(num_bytes: int) -> str:
    """The size for people to read.

    >>> in_units(1536), in_units(3 * 2**40)
    ('1.5 KiB', '3.0 TiB')
    """
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}"
