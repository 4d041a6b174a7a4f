"""Raw log-probabilities of tokens: before temperature, filters, penalties, biases and bans."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.core.types import Logprobs, SamplingRows
from mtp_jax.ops.branches import if_needed
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from mtp_jax.ops.trees import rows_of_path

_ROWS_AT_ONCE = 64
"""Rows of a prompt whose logits exist at the same time: 33 MB of a vocabulary of 129 k, where a chunk has 132."""


def token_logprobs(
    logits_BWV: Float[Array, "B W v"],
    tokens_BE: Int[Array, "b E"],
    rows: SamplingRows,
    max_logprobs: int,
    parallel: Parallel = NO_PARALLEL,
    path_BE: Int[Array, "b E"] | None = None,
) -> Logprobs | None:
    """Raw log-softmax of the tokens, and of the `max_logprobs` most likely ones in their places.

    Computed only if a slot of the launch asks; all zeros otherwise, and None in a program for which nobody can ask.
    Logits as in `choose_tokens`; `path_BE` names the row that each token comes from (None: the rows in order).

    >>> from mtp_jax.core.config import SamplingParams
    >>> from mtp_jax.testing.rows import sampling_rows
    >>> found = token_logprobs(
    ...     jnp.log(jnp.array([[[0.5, 0.25, 0.25]]])), jnp.array([[1]]), sampling_rows(SamplingParams(logprobs=1)), 1
    ... )
    >>> [round(float(jnp.exp(x[0, 0]).squeeze()), 3) for x in (found.chosen_BE, found.top_BEQ)], found.rank_BE.tolist()
    ([0.25, 0.5], [[2]])
    """
    if rows.needs.logprobs is False:
        return None
    return if_needed(
        rows.needs.logprobs,
        lambda: _of(rows_of_path(parallel.whole_logits(logits_BWV), path_BE), tokens_BE, max_logprobs),
        lambda: _none(tokens_BE, max_logprobs),
    )


def prompt_logprobs(
    hidden_YTD: Float[Array, "Y T D"],
    next_tokens_YT: Int[Array, "Y T"],
    unembed: Callable[[Float[Array, "Y R D"]], Float[Array, "B R v"]],
    is_needed: Bool[Array, ""] | bool,
    max_logprobs: int,
    parallel: Parallel = NO_PARALLEL,
) -> Logprobs | None:
    """Raw log-softmax of the token after each row of a prompt chunk, a block of rows at a time; zeros if not needed.

    None in a program for which nobody can need them.
    `unembed` takes the chunk's slots' hidden states and gives logits as in `choose_tokens`.
    """
    if is_needed is False:
        return None
    num_slots, num_rows, width = hidden_YTD.shape

    def of_block(block: tuple[Array, Array]) -> Logprobs:
        hidden_YRD, tokens_YR = block
        return _of(parallel.whole_logits(unembed(hidden_YRD)), tokens_YR, max_logprobs)

    def computed() -> Logprobs:
        if num_rows <= _ROWS_AT_ONCE:
            return of_block((hidden_YTD, next_tokens_YT))
        num_blocks = -(-num_rows // _ROWS_AT_ONCE)
        missing = num_blocks * _ROWS_AT_ONCE - num_rows
        hidden_YUD = jnp.pad(hidden_YTD, ((0, 0), (0, missing), (0, 0)))
        tokens_YU = jnp.pad(next_tokens_YT, ((0, 0), (0, missing)))
        blocks = (
            jnp.moveaxis(hidden_YUD.reshape(num_slots, num_blocks, _ROWS_AT_ONCE, width), 1, 0),
            jnp.moveaxis(tokens_YU.reshape(num_slots, num_blocks, _ROWS_AT_ONCE), 1, 0),
        )
        by_block = lax.map(of_block, blocks)
        return jax.tree.map(lambda x: _joined(x)[:, :num_rows], by_block)

    return if_needed(is_needed, computed, lambda: _none(next_tokens_YT, max_logprobs))


def _joined(blocks: Array) -> Array:
    """[blocks, Y, R, ...] as [Y, blocks * R, ...]."""
    by_slot = jnp.moveaxis(blocks, 0, 1)
    return by_slot.reshape(by_slot.shape[0], -1, *by_slot.shape[3:])


def _of(whole_BWV: Float[Array, "B W V"], tokens_BW: Int[Array, "B W"], max_logprobs: int) -> Logprobs:
    logprobs_BWV = jax.nn.log_softmax(whole_BWV, axis=-1)
    chosen_BW = jnp.take_along_axis(logprobs_BWV, tokens_BW[..., None], axis=-1)[..., 0]
    num_listed = min(max_logprobs, whole_BWV.shape[-1])
    top_BWQ, top_ids_BWQ = lax.top_k(logprobs_BWV, num_listed)
    padding = ((0, 0), (0, 0), (0, max_logprobs - num_listed))
    return Logprobs(
        chosen_BE=chosen_BW,
        top_ids_BEQ=jnp.pad(top_ids_BWQ, padding),
        top_BEQ=jnp.pad(top_BWQ, padding, constant_values=-jnp.inf),
        rank_BE=jnp.sum(logprobs_BWV > chosen_BW[..., None], axis=-1, dtype=jnp.int32) + 1,
    )


def _none(tokens_BW: Int[Array, "B W"], max_logprobs: int) -> Logprobs:
    shape = tokens_BW.shape
    return Logprobs(
        chosen_BE=jnp.zeros(shape, jnp.float32),
        top_ids_BEQ=jnp.zeros((*shape, max_logprobs), jnp.int32),
        top_BEQ=jnp.zeros((*shape, max_logprobs), jnp.float32),
        rank_BE=jnp.zeros(shape, jnp.int32),
    )
