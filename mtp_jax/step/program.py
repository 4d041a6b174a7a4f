"""What a compiled step is made of, apart from its shape: one frozen object."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.core.config import EngineConfig
from mtp_jax.core.layout import NO_TOKEN, ListSizes
from mtp_jax.core.topology import CHAIN, Topology
from mtp_jax.core.types import DecodeState, KVSpec, LayerKV, TokenLists
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.bound import BoundModel
from mtp_jax.ops.kv_cache import init_kv, stored_specs
from mtp_jax.ops.placement import AxisRules
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
    list_sizes: ListSizes
    max_logprobs: int
    topology: Topology = CHAIN
    parallel: Parallel = NO_PARALLEL
    is_voting: bool = False  # launches carry wishes for later steps, and bring back what was agreed
    debug: bool = False

    def bind(self, weights: Weights) -> BoundModel:
        """The model of this program with a trace's weights."""
        return BoundModel(self.family, weights, self.attention_backend, self.parallel, self.debug)


def init_state(program: StepProgram, config: EngineConfig, dtype: jnp.dtype) -> DecodeState:
    """Empty device state of the whole mesh: page pools are allocated here, once, and only ever donated afterwards."""
    num_slots = config.max_num_seqs
    pools = {
        "num_pages": config.pages_per_shard,
        "page_size": config.cache.page_size,
        "dtype": dtype,
        "num_shards": config.mesh.data,
    }
    return DecodeState(
        kv=init_kv(stored_specs(program.family.kv_specs(), program.attention_backend), **pools),
        draft_kv=init_kv(
            stored_specs(program.proposer.draft_kv_specs(program.family), program.attention_backend), **pools
        ),
        committed_len=jnp.zeros((num_slots,), jnp.int32),
        pending_token=jnp.zeros((num_slots,), jnp.int32),
        history_BS=jnp.zeros((num_slots, config.max_model_len), jnp.int32),
        lists=_no_lists(num_slots, program.list_sizes),
        finished=jnp.ones((num_slots,), bool),
        carry=program.proposer.init_carry(
            program.family, num_slots=num_slots, max_draft_len=config.max_draft_len, dtype=dtype
        ),
    )


def _no_lists(num_slots: int, sizes: ListSizes) -> TokenLists:
    return TokenLists(
        bias_ids_BA=jnp.zeros((num_slots, sizes.num_biases), jnp.int32),
        biases_BA=jnp.zeros((num_slots, sizes.num_biases), jnp.float32),
        bad_words_BMO=jnp.full((num_slots, sizes.num_bad_words, sizes.bad_word_len), NO_TOKEN, jnp.int32),
    )


def state_specs(program: StepProgram, config: EngineConfig, dtype: jnp.dtype, rules: AxisRules) -> DecodeState:
    """How the state is split: slots and pages over `data`; KV heads over `model` where a family says so."""
    slots = rules.spec("slots")
    shapes = jax.eval_shape(lambda: init_state(program, config, dtype))

    def kv_specs(specs: Sequence[KVSpec]) -> tuple[LayerKV, ...]:
        def pool(spec: KVSpec) -> Any:
            return rules.spec("slots", None, spec.axis, None)

        return tuple(LayerKV(pool(spec), None if spec.v_channels is None else pool(spec)) for spec in specs)

    return DecodeState(
        kv=kv_specs(program.family.kv_specs()),
        draft_kv=kv_specs(program.proposer.draft_kv_specs(program.family)),
        committed_len=slots,  # type: ignore[arg-type]
        pending_token=slots,  # type: ignore[arg-type]
        history_BS=slots,  # type: ignore[arg-type]
        lists=jax.tree.map(lambda _: slots, shapes.lists),
        finished=slots,  # type: ignore[arg-type]
        carry=jax.tree.map(lambda _: slots, shapes.carry),
    )
