"""Small engines that compile once and serve many examples.

An engine's compiled programs depend on its configuration; its books do not. `toy_engine` builds, `restart` gives the
same programs empty books, with another policy, readback depth, page budget or near-limit rule.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.core.config import CacheConfig, EngineConfig, MeshConfig, SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.shortlist import with_shortlist
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.testing.toy_family import ToyFamily


@functools.cache
def toy_engine(
    family: ModelFamily = ToyFamily(),  # noqa: B008  frozen
    *,
    max_draft_len: int = 3,
    method: str | None = "mtp",
    draft_sampling: str | None = None,
    max_model_len: int = 48,
    max_num_seqs: int = 3,
    page_size: int = 4,
    prefill_chunk: int = 16,
    max_logprobs: int = 3,
    max_stop_token_ids: int = 4,
    num_pages: int | None = None,
    data: int = 1,
    model: int = 1,
    **drafting: Any,
) -> Engine:
    """An engine over `family`, built once for each set of arguments; call `restart` on it before each use.

    By default the pool lets every slot be full, and drafts are drawn as the acceptance rule wants. `drafting`: more
    fields of its `SpeculativeConfig`. Compiled without most optimizations: a toy's steps are short, its compiles are
    not.
    """
    if draft_sampling is not None:
        drafting = {**drafting, "draft_sampling": draft_sampling}
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=max_draft_len, **drafting)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        mesh=MeshConfig(data=data, model=model),
        cache=CacheConfig(page_size=page_size, num_pages=num_pages),
        speculative=speculative,
        prefill_chunk=prefill_chunk,
        max_logprobs=max_logprobs,
        max_stop_token_ids=max_stop_token_ids,
    )
    weights = family.init_weights(jax.random.key(0), None)
    size = speculative.draft_vocab_size
    if size is not None:
        # Every third token, then those between them: a shortlist of a toy is not just its lowest ids.
        ids = range(family.vocab_size)
        weights = with_shortlist(family, weights, sorted(ids, key=lambda token: (token % 3, token)), size)
    return without_optimizations(lambda: Engine(family, weights, config))


def without_optimizations(build: Callable[[], Any]) -> Any:
    """Calls `build` while jax compiles fast instead of well: about half the compile time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return build()
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def restart(
    engine: Engine,
    *,
    policy: DraftLenPolicy | None = None,
    policies: Sequence[DraftLenPolicy] | None = None,
    readback_depth: int = 1,
    num_pages: int | None = None,
    max_model_len: int | None = None,
    near_limit: str = "row_cap",
    prefix_caching: bool = True,
) -> Engine:
    """The engine with empty books over its compiled programs; the device keeps whatever earlier runs left there.

    `policies`: one for each data shard of this process, so that they differ in what they wish for. `num_pages` and
    `max_model_len` may be lowered below what was compiled: the host just uses less of it.
    """
    config = engine.config
    config = replace(
        config,
        readback_depth=readback_depth,
        cache=replace(
            config.cache,
            num_pages=config.num_pages if num_pages is None else num_pages,
            prefix_caching=prefix_caching,
        ),
        max_model_len=config.max_model_len if max_model_len is None else max_model_len,
        speculative=replace(config.speculative, near_limit=near_limit),
    )
    each = iter(policies or ())
    return engine.restarted(config, lambda: next(each) if policies else policy or FixedDraftLen())


def poison(engine: Engine) -> None:
    """Fills what no request has written yet with what shows when it is read: for engines without running requests.

    Every page of target and drafter, the null page included, with NaN; every slot's history with `NO_SUCH_TOKEN`.
    """
    state = engine.launcher._state
    kv, draft_kv = jax.tree.map(lambda pages: _filled(pages, math.nan), (state.kv, state.draft_kv))
    history_BS = _filled(state.history_BS, NO_SUCH_TOKEN)
    engine.launcher._state = dataclasses.replace(state, kv=kv, draft_kv=draft_kv, history_BS=history_BS)


NO_SUCH_TOKEN = -77
"""No id of a vocabulary, and none of the marks that the engine itself uses."""


def _filled(like: jax.Array, value: float) -> jax.Array:
    return _filler(like.shape, like.dtype, like.sharding, value)()


@functools.cache
def _filler(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding, value: float
) -> Callable[[], jax.Array]:
    """Each device makes its own part: no process could hand out an array that it does not hold."""
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=sharding)


def written_positions(engine: Engine, pages: Sequence[int]) -> list[set[int]]:
    """Of a slot that holds `pages`: positions written since `poison`, one set a layer, the drafter's layers last."""
    state = engine.launcher._state
    written = []
    for layer_kv in (*state.kv, *state.draft_kv):
        k_SX = np.asarray(layer_kv.k_pages)[list(pages)].reshape(len(pages) * engine.config.cache.page_size, -1)
        written.append(set(np.flatnonzero(~np.isnan(k_SX).any(axis=1)).tolist()))
    return written
