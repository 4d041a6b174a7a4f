"""From options to a model that is ready, with a progress bar while it compiles."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from mtp_jax.checkpoints import add_drafter, load_model
from mtp_jax.cli.options import NO_METHOD
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.admission import problem_with
from mtp_jax.engine.requests import Request
from mtp_jax.llm import LLM
from mtp_jax.memory import check_memory
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.sharding import check_mesh
from mtp_jax.ops.placement import Placement
from mtp_jax.options import engine_config, mesh_config, resolve_dtype
from mtp_jax.progress import compile_bar
from mtp_jax.text import tokenizer_of


@dataclass(frozen=True)
class Model:
    """Loaded once; several `LLM`s may share its weights."""

    family: ModelFamily
    weights: Weights
    tokenizer: Tokenizer | None
    dtype: Any
    tokens_by_rank: tuple[int, ...] | None
    folder: Path


def load(options: Namespace) -> Model:
    """The model that `--model` and `--dtype` name, with its drafter, if any. `ConfigError` where there is none."""
    mesh = mesh_config(vars(options).get("mesh"))  # not every command runs on one
    loaded = load_model(options.model, dtype=resolve_dtype(options.dtype), mesh=mesh)
    family, weights = loaded.family, loaded.weights
    if vars(options).get("speculative_model") is not None:  # not every command drafts
        family, weights = add_drafter(family, weights, options.speculative_model, dtype=loaded.dtype)
    return Model(family, weights, tokenizer_of(loaded), loaded.dtype, loaded.tokens_by_rank, loaded.folder)


_OPEN = (
    "draft_sampling",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "relaxed_topk",
    "relaxed_delta",
    "synthetic_acceptance",
)
"""Options that are left to the library unless given."""


def speculative_config(options: Namespace, **more: Any) -> SpeculativeConfig | None:
    """The options of `add_speculation`; None with `--method none`."""
    if options.method == NO_METHOD:
        return None
    return SpeculativeConfig(
        method=options.method,
        model=options.speculative_model,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_vocab_size=options.draft_vocab_size,
        tree_topk=options.tree_topk,
        tree_nodes=options.tree_nodes,
        acceptance=options.acceptance,
        block_verification=options.block_verification,
        **{name: value for name in _OPEN if (value := getattr(options, name)) is not None},
        **more,
    )


def gated_config(options: Namespace) -> SpeculativeConfig | None:
    """The options of `add_speculation` where it offers policies: the policy and its acceptance gate too."""
    gate = {
        name: value
        for name in ("disable_below_acceptance", "acceptance_window", "draft_len_schedule", "near_limit")
        if (value := getattr(options, name)) is not None
    }
    return speculative_config(options, policy=options.policy, **gate)


def engine_options(
    options: Namespace, model: Model, *, num_slots: int, num_tokens: int, longest_prompt: int
) -> dict[str, Any]:
    """Keyword arguments of `LLM` that fit `num_slots` requests of up to `num_tokens` tokens and no more.

    A short context keeps attention short, and small prompts need few prefill programs: both shorten the start.
    """
    page_size = options.block_size
    needed = -(-max(num_tokens, 2) // max(page_size, 1)) * page_size
    max_model_len = min(needed, model.family.max_position_embeddings)
    num_shards = (options.mesh or {}).get("data", 1)
    return {
        "max_model_len": max_model_len if options.max_model_len is None else options.max_model_len,
        "max_num_seqs": -(-num_slots // max(num_shards, 1)) * max(num_shards, 1),
        "block_size": page_size,
        "num_kv_blocks": options.num_kv_blocks,
        "attention_backend": options.attention_backend,
        "moe_backend": options.moe_backend,
        "linear_backend": options.linear_backend,
        "mesh": options.mesh,
        # Rounds that are timed repeat their prompts: each computes them anew.
        "enable_prefix_caching": False,
        "prefill_chunk": next((chunk for chunk in (16, 64) if longest_prompt <= chunk), 256),
    }


def start(model: Model, speculative: SpeculativeConfig | None, settings: Mapping[str, Any], label: str) -> LLM:
    """An `LLM` with every program compiled; the bar goes to stderr, and only to a terminal."""
    config = engine_config(model.family, speculative, **settings)
    with compile_bar(model.family, config, label) as on_shape:
        return LLM.from_weights(
            model.family,
            model.weights,
            tokenizer=model.tokenizer,
            dtype=model.dtype,
            speculative_config=speculative,
            on_shape=on_shape,
            tokens_by_rank=model.tokens_by_rank,
            **settings,
        )


def check(
    model: Model,
    speculative: SpeculativeConfig | None,
    settings: Mapping[str, Any],
    prompt: tuple[int, ...],
    params: SamplingParams,
) -> None:
    """Raises `ConfigError` for what the engine would refuse, before anything is compiled."""
    config = engine_config(model.family, speculative, **settings)
    check_memory(model.family, config, jnp.dtype(model.dtype))
    check_mesh(model.family, config.mesh)
    Placement.of(config.mesh)
    request = Request("0", prompt, params, seed=params.seed or 0, eos_token_ids=model.family.eos_token_ids)
    problem = problem_with(request, config, vocab_size=model.family.vocab_size)
    if problem is not None:
        raise ConfigError(problem)


def use_compile_cache(is_wanted: bool) -> None:
    """Lets jax keep compiled programs on disk, or stops it. A folder that the user chose through jax is left alone."""
    jax.config.update("jax_enable_compilation_cache", is_wanted)
    if is_wanted and _users_cache_folder() is None:
        jax.config.update("jax_compilation_cache_dir", str(compile_cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_cache_folder() -> Path:
    """The user's choice through jax, else `mtp_jax/xla` in the user's cache folder, by the XDG rule."""
    ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp_jax" / "xla"
    return Path(_users_cache_folder() or ours)


def _users_cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
