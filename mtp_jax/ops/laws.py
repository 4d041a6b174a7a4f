"""Laws of tokens as probabilities: what sampled drafts are drawn from and what rejection compares them with.

Target and drafter go through the same function, so temperature, filters and all else that a request asked for are the
same on both sides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.core.types import SamplingRows
from mtp_jax.ops.sharding import NO_PARALLEL


def row_probs(law_BWV: Float[Array, "B W V"], rows: SamplingRows) -> Float[Array, "B W V"]:
    """The probabilities that `law_logits` mean, in float32: softmax, or all on one token where a slot is greedy.

    What is filtered out has probability 0 exactly. Greedy rows: the argmax, ties to the lowest id.

    >>> from mtp_jax.core.config import SamplingParams
    >>> from mtp_jax.testing.rows import sampling_rows
    >>> rows = sampling_rows(SamplingParams(), SamplingParams(temperature=0))
    >>> row_probs(jnp.array([[[0.0, 0.0]], [[0.0, 0.0]]]), rows).tolist()
    [[[0.5, 0.5]], [[1.0, 0.0]]]
    """
    ids_11V = jnp.arange(law_BWV.shape[-1], dtype=jnp.int32)[None, None, :]
    is_best_BWV = NO_PARALLEL.argmax_over_vocab(law_BWV)[..., None] == ids_11V
    one_hot_BWV = jnp.where(is_best_BWV, jnp.float32(0), -jnp.inf)
    is_sampled_B11 = rows.temperature_B[:, None, None] > 0
    return jax.nn.softmax(jnp.where(is_sampled_B11, law_BWV.astype(jnp.float32), one_hot_BWV), axis=-1)


def draw(weights_BWV: Float[Array, "B W V"], noise_BWV: Float[Array, "B W V"]) -> Int[Array, "B W"]:
    """A token of each row with probability proportional to its weight: argmax(log weight + Gumbel noise).

    A token of weight 0 is never drawn unless all weights are 0.

    >>> draw(jnp.array([[[0.0, 0.5, 2.0]]]), jnp.array([[[9.0, 3.0, 0.0]]])).tolist()
    [[1]]
    """
    return NO_PARALLEL.argmax_over_vocab(jnp.log(weights_BWV) + noise_BWV)
