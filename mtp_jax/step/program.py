"""What a compiled step is made of, apart from its shape: one frozen object."""

from dataclasses import dataclass

import jax.numpy as jnp

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.core.config import EngineConfig
from mtp_jax.core.types import DecodeState
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.bound import BoundModel
from mtp_jax.ops.kv_cache import init_kv
from mtp_jax.ops.sharding import NO_PARALLEL, Parallel
from mtp_jax.proposers.api import DraftProposer


@dataclass(frozen=True)
class StepProgram:
    """The variants chosen for one engine. Equal programs and equal shapes compile once."""

    family: ModelFamily
    proposer: DraftProposer
    rule: AcceptanceRule
    attention_backend: str
    num_stop_ids: int
    max_logprobs: int
    parallel: Parallel = NO_PARALLEL
    debug: bool = False

    def bind(self, weights: Weights) -> BoundModel:
        """The model of this program with a trace's weights."""
        return BoundModel(self.family, weights, self.attention_backend, self.parallel, self.debug)


def init_state(program: StepProgram, config: EngineConfig, dtype: jnp.dtype) -> DecodeState:
    """Empty device state: page pools are allocated here, once, and only ever donated afterwards."""
    num_slots = config.max_num_seqs
    pools = {"num_pages": config.num_pages, "page_size": config.cache.page_size, "dtype": dtype}
    return DecodeState(
        kv=init_kv(program.family.kv_specs(), **pools),
        draft_kv=init_kv(program.proposer.draft_kv_specs(program.family), **pools),
        committed_len=jnp.zeros((num_slots,), jnp.int32),
        pending_token=jnp.zeros((num_slots,), jnp.int32),
        finished=jnp.ones((num_slots,), bool),
        carry=program.proposer.init_carry(
            program.family, num_slots=num_slots, max_draft_len=config.max_draft_len, dtype=dtype
        ),
    )
