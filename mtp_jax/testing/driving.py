"""Runs requests through an engine by a plan: who arrives when, who is preempted, who leaves; checks all the way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Progress, Request
from mtp_jax.testing.checks import CheckFailed, check_pages, check_seats, check_trace


class Action(StrEnum):
    """What may happen to a request between two steps."""

    PREEMPT = "preempt"
    CANCEL = "cancel"


@dataclass(frozen=True)
class Event:
    """`action` on the request of index `request`, before step `step`; nothing happens if it is not running by then."""

    step: int
    action: Action
    request: int


@dataclass(frozen=True)
class Plan:
    """An interleaving. `arrivals[i]` is the step before which request i is submitted (0 where the list ends).

    >>> plan = Plan(arrivals=(0, 4), events=(Event(step=6, action=Action.PREEMPT, request=0),))
    >>> plan.arrival(1), plan.arrival(2)
    (4, 0)
    """

    arrivals: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()

    def arrival(self, index: int) -> int:
        """The step before which request `index` is submitted."""
        return self.arrivals[index] if index < len(self.arrivals) else 0


NO_PLAN = Plan()
_MAX_STEPS = 10_000


@dataclass
class Run:
    """What came of a plan: the last progress of every request that ended, and who was cancelled."""

    finished: Mapping[str, Progress] = field(default_factory=dict[str, Progress])
    cancelled: frozenset[str] = frozenset()
    num_steps: int = 0


def run_plan(
    engine: Engine,
    requests: Sequence[Request],
    plan: Plan = NO_PLAN,
    *,
    after_step: Callable[[Engine], None] | None = None,
) -> Run:
    """Serves the requests to the end, checking the books after every operation and every trace at its end.

    Ids must differ. `after_step` is called once a step, for checks of the caller's own.
    """
    finished: dict[str, Progress] = {}
    deltas: dict[str, list[int]] = {request.request_id: [] for request in requests}
    cancelled: set[str] = set()
    num_submitted = step = 0
    engine.start()  # the other processes of the mesh, if there are any, launch whether there is work here or not
    while num_submitted < len(requests) or engine.has_work:
        for index, request in enumerate(requests):
            if plan.arrival(index) == step:
                engine.submit(request)
                num_submitted += 1
        for event in plan.events:
            if event.step == step:
                _act(engine, event, requests, cancelled)
                _check_books(engine)
        for progress in engine.step():
            _check_order(progress, finished, cancelled)
            deltas[progress.request_id] += progress.new_tokens
            if progress.finish_reason is not None:
                finished[progress.request_id] = progress
        _check_books(engine)
        if after_step is not None:
            after_step(engine)
        step += 1
        if step > _MAX_STEPS:
            raise CheckFailed(f"not done after {_MAX_STEPS} steps")
    engine.drain()
    _check_books(engine)
    for request in requests:
        if request.request_id in finished:
            _check_finished(engine, request, finished[request.request_id], deltas[request.request_id])
    return Run(finished, frozenset(cancelled), step)


def _act(engine: Engine, event: Event, requests: Sequence[Request], cancelled: set[str]) -> None:
    if event.request >= len(requests):
        return
    request_id = requests[event.request].request_id
    if event.action is Action.CANCEL:
        if engine.cancel(request_id):
            cancelled.add(request_id)
        return
    engine.group.preempt(request_id)


def _check_books(engine: Engine) -> None:
    for shard in engine.group.shards:
        check_pages(shard)
    check_seats(engine.group)


def _check_order(progress: Progress, finished: Mapping[str, Progress], cancelled: set[str]) -> None:
    if progress.request_id in finished or progress.request_id in cancelled:
        raise CheckFailed(f"request {progress.request_id} was heard of after its end: {progress}")


def _check_finished(engine: Engine, request: Request, last: Progress, deltas: list[int]) -> None:
    state = last.state
    if deltas != state.tokens:
        raise CheckFailed(f"the deltas of {request.request_id} join to {deltas}, its tokens are {state.tokens}")
    spec = engine.config.speculative
    if request.wants_trace and last.error is None:
        check_trace(
            state.records,
            state.tokens,
            prompt_len=len(request.prompt),
            limit=state.limit,
            stop_ids=request.stop_ids,
            page_size=engine.config.cache.page_size,
            emits_target_tokens=spec.keeps == "tokens",
            keeps_right_drafts=spec.acceptance == "match",
        )
