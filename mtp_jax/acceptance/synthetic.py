"""Forced acceptance, for benchmarks: drafts stand at rates that the user sets, whatever they are.

What a drafter that good would bring can so be measured before it is trained. The text is not the target's: lossy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.acceptance.api import AcceptanceRule, target_after_prefix
from mtp_jax.core.types import Accepted, Drafts, SlotView
from mtp_jax.ops.kv_cache import row_positions
from mtp_jax.ops.sampling import Stream, uniform_coins
from mtp_jax.ops.sharding import Parallel


@dataclass(frozen=True)
class Synthetic:
    """Draft k stands with probability `rates[k]`, given that all before it do; `inner` only says the target's tokens.

    The coins are those of (request seed, position), so every device throws the same, and so does every draft length.
    """

    inner: AcceptanceRule
    rates: tuple[float, ...]

    @property
    def takes_trees(self) -> bool:
        return False

    def accept(
        self, drafts: Drafts, target_logits_BWV: Float[Array, "B W v"], slots: SlotView, parallel: Parallel
    ) -> Accepted:
        target_tokens_BW = self.inner.accept(drafts, target_logits_BWV, slots, parallel).target_tokens_BW
        num_drafts = drafts.tokens_BK.shape[1]
        position_BK = row_positions(slots.committed_len + 1, num_drafts)
        coins_BK = uniform_coins(slots.sampling.key_B2, position_BK, Stream.ACCEPT)
        rates_1K = jnp.array([self.rates[:num_drafts]], jnp.float32)
        return target_after_prefix(drafts, coins_BK < rates_1K, slots.draft_cap, target_tokens_BW)


def conditional_rates(shares: Sequence[float]) -> tuple[float, ...]:
    """Rates given that all drafts before stand, from shares of all steps; 0 after a share of 0.

    >>> conditional_rates((0.8, 0.4, 0.0, 0.0))
    (0.8, 0.5, 0.0, 0.0)
    """
    before = (1.0, *shares)
    return tuple(share / earlier if earlier > 0 else 0.0 for share, earlier in zip(shares, before, strict=False))
