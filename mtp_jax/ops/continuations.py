"""Several tokens for one place, the likeliest first: what the branches of a draft tree are."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.core.types import RowText, SamplingRows
from mtp_jax.ops.branches import if_needed
from mtp_jax.ops.sampling import law_of_head
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel


def likeliest_tokens(
    logits_BWV: Float[Array, "B W v"],
    noise_BWV: Float[Array, "b W V"],
    rows: SamplingRows,
    text: RowText,
    num_tokens: int,
    parallel: Parallel = NO_PARALLEL,
    ids_N: Int[Array, " N"] | None = None,
) -> tuple[Int[Array, "b W k"], Float[Array, "b W k"]]:
    """The `num_tokens` tokens that `choose_tokens` would sooner take than any other, best first; log of their chances.

    What ranks is the score whose argmax is the token: logits of its law + noise, at temperature 0 without noise. A
    token's chance is the softmax of these scores: the probability that another model chooses it under the same noise,
    if that model's log-probabilities are these with (Gumbel) errors. So at temperature 0 it is the probability by the
    logits, and above it is high for a token that the noise lifts, however improbable the token is without.
    Equal scores: the lower id first. Logits and `ids_N` as in `choose_tokens`.

    >>> from mtp_jax.core.config import SamplingParams
    >>> from mtp_jax.testing.rows import no_text, sampling_rows
    >>> logits, noise = jnp.array([[[2.0, 1.0, 0.0]]]), jnp.array([[[0.0, 3.0, 0.0]]])
    >>> tokens, _ = likeliest_tokens(logits, noise, sampling_rows(SamplingParams()), no_text(logits), 2)
    >>> tokens.tolist()
    [[[1, 0]]]
    """

    def sampled() -> tuple[Array, Array]:
        law_BWV = law_of_head(logits_BWV, rows, text, noise_BWV.shape[-1], parallel, ids_N)
        scores_BWV = jnp.where(rows.temperature_B[:, None, None] > 0, law_BWV + noise_BWV, law_BWV)
        top_BWk, tokens_BWk = NO_PARALLEL.top_over_vocab(scores_BWV, num_tokens)
        return tokens_BWk, top_BWk - NO_PARALLEL.logsumexp_over_vocab(scores_BWV)[..., None]

    def greedy() -> tuple[Array, Array]:
        return likeliest_greedy_tokens(logits_BWV, num_tokens, parallel, ids_N)

    return if_needed(rows.needs.whole_logits, sampled, greedy)


def likeliest_greedy_tokens(
    logits_BWV: Float[Array, "B W v"],
    num_tokens: int,
    parallel: Parallel = NO_PARALLEL,
    ids_N: Int[Array, " N"] | None = None,
) -> tuple[Int[Array, "b W k"], Float[Array, "b W k"]]:
    """The most probable tokens and their log-probabilities at any temperature; arguments as in `choose_tokens`.

    >>> tokens, logprobs = likeliest_greedy_tokens(jnp.log(jnp.array([[[0.25, 0.5, 0.25]]])), 2)
    >>> tokens.tolist(), [round(float(x), 3) for x in jnp.exp(logprobs)[0, 0]]
    ([[[1, 0]]], [0.5, 0.25])
    """
    top_BWk, columns_BWk = parallel.top_over_vocab(logits_BWV, num_tokens)
    logprobs_BWk = top_BWk - parallel.logsumexp_over_vocab(logits_BWV)[..., None]
    columns_BWk = parallel.own_slots(columns_BWk)
    return columns_BWk if ids_N is None else ids_N[columns_BWk], parallel.own_slots(logprobs_BWk)
