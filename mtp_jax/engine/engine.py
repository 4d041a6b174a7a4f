"""The loop. `Engine.step` is the whole of it: decide, build, launch, read late, reconcile."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from mtp_jax.acceptance.registry import RULES
from mtp_jax.core.config import EngineConfig, FinishReason
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.shapes import ShapeGrid
from mtp_jax.engine.admission import problem_with
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.decisions import Decision, StepDecision
from mtp_jax.engine.launch import Launcher, OnShape
from mtp_jax.engine.readback import Readback
from mtp_jax.engine.requests import Progress, Request, RequestState, RequestStatus
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.policies.registry import NEEDS_STEP_COSTS, POLICIES
from mtp_jax.proposers.registry import PROPOSERS, resolve_method
from mtp_jax.step.program import StepProgram

_log = logging.getLogger(__name__)
_FLOAT32 = jnp.dtype("float32")


class Engine:
    """Continuous batching over one compiled grid of steps. Token ids in, token ids out.

    Not thread-safe. Build it, then `submit` requests and call `step` while `has_work`.
    """

    def __init__(
        self,
        family: ModelFamily,
        weights: Weights,
        config: EngineConfig,
        *,
        dtype: jnp.dtype = _FLOAT32,
        on_shape: OnShape | None = None,
    ) -> None:
        num_eos, room = len(family.eos_token_ids), config.max_stop_token_ids
        if num_eos > room:
            raise ConfigError(f"the model has {num_eos} end-of-text ids; at most {room} are allowed.")
        method, max_draft_len = resolve_method(config.speculative, family)
        speculative = config.speculative
        if max_draft_len != speculative.num_speculative_tokens:
            speculative = replace(speculative, num_speculative_tokens=max_draft_len)
        self.config = replace(config, speculative=speculative)
        self.family = family
        self.grid = ShapeGrid.of(self.config)
        proposer = PROPOSERS[method](family, speculative)
        self.program = StepProgram(
            family=family,
            proposer=proposer,
            rule=RULES[speculative.acceptance],
            attention_backend=self.config.attention_backend,
            num_stop_ids=self.config.max_stop_token_ids,
            max_logprobs=self.config.max_logprobs,
            debug=self.config.debug_checks,
        )
        self._batch = BatchBuilder(self.config, lookahead=proposer.lookahead)
        self.launcher = Launcher(self.program, weights, self.config, self.grid, self._batch, dtype)
        self.launcher.warm(on_shape)
        needs_costs = speculative.policy in NEEDS_STEP_COSTS
        self.step_costs = self.launcher.measure_step_costs() if needs_costs else {}
        self.scheduler = Scheduler(self.config, self.grid, POLICIES[speculative.policy](speculative, self.step_costs))
        self._readback = Readback(self.config.readback_depth)
        self._refused: list[Progress] = []
        _log.info("engine configuration: %s, method %s", self.config, method)

    @property
    def has_work(self) -> bool:
        """Some request is unfinished, or refused and not yet reported."""
        return self.scheduler.has_work or bool(self._refused)

    def submit(self, request: Request) -> None:
        """Queues a request; one that cannot be served comes back from the next `step` as rejected."""
        problem = problem_with(request, self.config, vocab_size=self.family.vocab_size)
        if problem is None:
            self.scheduler.submit(request)
            return
        state = RequestState(request, limit=0, status=RequestStatus.FINISHED)
        self._refused.append(Progress(request.request_id, (), state, FinishReason.REJECTED, error=problem))

    def cancel(self, request_id: str) -> bool:
        """Drops a request at once; False if it is not here."""
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Progress]:
        """One turn of the loop: at most one launch, and the results that are due."""
        progress, self._refused = self._refused, []
        decision = self.scheduler.decide()
        if decision is not None:
            launch = self.launcher.launch(decision, self._build_inputs(decision))
            self._readback.push(launch)
        for result in self._readback.ready(is_idle=decision is None):
            progress += self.scheduler.reconcile(result)
        return progress

    def run(self) -> Iterator[Progress]:
        """Steps until nothing is left to do."""
        while self.has_work:
            yield from self.step()
        self.drain()

    def drain(self) -> None:
        """Reads what is still in flight, such as steps launched for a request that a stop string ended."""
        while len(self._readback):
            for result in self._readback.ready(is_idle=True):
                self.scheduler.reconcile(result)

    def _build_inputs(self, decision: Decision) -> jax.Array:
        if isinstance(decision, StepDecision):
            return self._batch.build_step_inputs(decision, self.scheduler.slots)
        return self._batch.build_prefill_inputs(decision, self.scheduler.slots)
