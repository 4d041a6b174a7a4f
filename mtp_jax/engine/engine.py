"""The loop. `Engine.step` is the whole of it: decide, build, launch, read late, reconcile."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from mtp_jax.acceptance.registry import rule_of
from mtp_jax.core.config import EngineConfig, FinishReason
from mtp_jax.core.errors import ConfigError, EngineFailed, InvariantError
from mtp_jax.core.shapes import ShapeGrid
from mtp_jax.engine.admission import problem_with
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.consensus import check_same_everywhere
from mtp_jax.engine.group import Group
from mtp_jax.engine.launch import Launcher, OnShape
from mtp_jax.engine.readback import Readback
from mtp_jax.engine.requests import Progress, Request, RequestState, RequestStatus
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.moe_backend import with_linear_backend, with_moe_backend
from mtp_jax.models.sharding import check_mesh
from mtp_jax.models.shortlist import check_shortlist
from mtp_jax.ops.placement import Placement
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.registry import NEEDS_STEP_COSTS, policy_of
from mtp_jax.proposers.registry import PROPOSERS, resolve_method
from mtp_jax.step.program import StepProgram

_log = logging.getLogger(__name__)
_FLOAT32 = jnp.dtype("float32")


class Engine:
    """Continuous batching over one compiled grid of steps. Token ids in, token ids out.

    Not thread-safe. Build it, then `submit` requests and call `step` while `has_work`.
    `grid`: other shapes than `ShapeGrid.of(config)`, for measurements that use few; any other is an error at launch.
    """

    def __init__(
        self,
        family: ModelFamily,
        weights: Weights,
        config: EngineConfig,
        *,
        dtype: jnp.dtype = _FLOAT32,
        on_shape: OnShape | None = None,
        grid: ShapeGrid | None = None,
    ) -> None:
        family = with_moe_backend(family, config.moe_backend, dtype)
        family = with_linear_backend(family, config.linear_backend, dtype)
        num_eos, room = len(family.eos_token_ids), config.max_stop_token_ids
        if num_eos > room:
            raise ConfigError(f"the model has {num_eos} end-of-text ids; at most {room} are allowed.")
        method, max_draft_len = resolve_method(config.speculative, family)
        speculative = config.speculative
        if max_draft_len != speculative.num_speculative_tokens:
            speculative = speculative.limited_to(max_draft_len)
        self.config = replace(config, speculative=speculative)
        check_mesh(family, config.mesh)
        check_shortlist(weights, speculative.draft_vocab_size, config.mesh)
        placement = Placement.of(config.mesh)
        check_same_everywhere(self.config, family, weights, dtype)
        self.family = family
        self.grid = ShapeGrid.of(self.config) if grid is None else grid
        proposer = PROPOSERS[method].build(family, speculative)
        self.program = StepProgram(
            family=family,
            proposer=proposer,
            rule=rule_of(speculative),
            attention_backend=self.config.attention_backend,
            num_stop_ids=self.config.max_stop_token_ids,
            list_sizes=self.config.list_sizes,
            max_logprobs=self.config.max_logprobs,
            topology=self.config.topology,
            parallel=placement.parallel,
            is_voting=placement.is_voting,
            debug=self.config.debug_checks,
        )
        self.placement = placement
        self._batch = self._new_batch()
        self.launcher = Launcher(self.program, weights, self.config, self.grid, self._batch, placement, dtype)
        self.launcher.warm(on_shape)
        needs_costs = speculative.policy in NEEDS_STEP_COSTS
        self.step_costs = self.launcher.measure_step_costs() if needs_costs else {}
        self.group = self._new_group(self.config, lambda: policy_of(speculative, self.step_costs))
        self._readback = Readback(self.config.readback_depth, self.config.topology)
        self._refused: list[Progress] = []
        self._unfinished: set[str] = set()
        self._failure: str | None = None
        _log.info("engine configuration: %s, method %s", self.config, method)

    def _new_batch(self) -> BatchBuilder:
        return BatchBuilder(self.config, self.placement, is_voting=self.program.is_voting)

    def _new_group(self, config: EngineConfig, make_policy: Callable[[], DraftLenPolicy]) -> Group:
        return Group(
            config,
            self.grid,
            make_policy,
            num_shards=self.placement.num_local_shards,
            is_voting=self.program.is_voting,
            lookahead=self.program.proposer.lookahead,
        )

    def restarted(self, config: EngineConfig, make_policy: Callable[[], DraftLenPolicy]) -> "Engine":
        """An engine with empty books over the same compiled programs and device state: for tests and benchmarks.

        `config` may differ from this engine's in what the host alone decides: readback depth, near-limit rule, and a
        page budget or `max_model_len` below what was compiled. The two must not be used in turns.
        """
        again = copy.copy(self)
        again.config = config
        again.group = self._new_group(config, make_policy)
        again._readback = Readback(config.readback_depth, config.topology)
        again._batch = self._new_batch()
        again._refused = []
        again._unfinished = set()
        again._failure = None
        return again

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of an engine with one data shard in this process; `InvariantError` where there are more."""
        if len(self.group.shards) != 1:
            raise InvariantError(f"this process schedules {len(self.group.shards)} data shards, not one")
        return self.group.shards[0]

    @property
    def has_work(self) -> bool:
        """Some request is unfinished, or refused and not yet reported."""
        return self.group.has_work or bool(self._refused)

    def submit(self, request: Request) -> None:
        """Queues a request; one that cannot be served comes back from the next `step` as rejected.

        `ConfigError` for the id of a request that has not ended: their tokens could not be told apart.
        """
        if request.request_id in self._unfinished:
            raise ConfigError(
                f"request id {request.request_id!r} belongs to a request that has not ended; give each its own id."
            )
        self._unfinished.add(request.request_id)
        problem = problem_with(request, self.config, vocab_size=self.family.vocab_size)
        if problem is None:
            self.group.submit(request)
            return
        state = RequestState(request, limit=0, status=RequestStatus.FINISHED)
        self._refused.append(Progress(request.request_id, (), state, FinishReason.REJECTED, error=problem))

    def cancel(self, request_id: str) -> bool:
        """Drops a request at once; False if it is not here."""
        is_here = self.group.cancel(request_id)
        if is_here:
            self._unfinished.remove(request_id)
        return is_here

    def start(self) -> None:
        """Takes part in the mesh's next steps even without a request; see `drain`. Nothing to do in one process."""
        self.group.start()

    def step(self) -> list[Progress]:
        """One turn of the loop: at most one launch, and the results that are due."""
        refused, self._refused = self._refused, []
        progress = refused + self._turn()
        self._unfinished.difference_update(one.request_id for one in progress if one.finish_reason is not None)
        return progress

    def _turn(self) -> list[Progress]:
        if self._failure is not None:
            raise EngineFailed(self._failure)
        try:
            return self._launch_and_read()
        except jax.errors.JaxRuntimeError as error:
            self._failure = f"A step failed on a device, or another process is gone: {str(error).splitlines()[0]}"
            raise EngineFailed(self._failure) from error
        except InvariantError as error:
            self._failure = f"The engine's books do not add up: {error}"  # nothing is launched by them any more
            raise

    def _launch_and_read(self) -> list[Progress]:
        decision = self.group.decide()
        if decision is not None:
            inputs = self._batch.build(decision, [shard.slots for shard in self.group.shards])
            self._readback.push(self.launcher.launch(decision, inputs))
        results = self._readback.ready(is_idle=decision is None)
        return [progress for result in results for progress in self.group.reconcile(result)]

    def run(self) -> Iterator[Progress]:
        """Steps until nothing is left to do."""
        while self.has_work:
            yield from self.step()
        self.drain()

    def drain(self) -> None:
        """Launches with the others until nobody has work, and reads what is still in flight.

        In flight there may be steps for a request that a stop string ended. To be called when this process has no work.
        """
        while self._failure is None and (self.group.is_running or len(self._readback)):
            self._turn()
