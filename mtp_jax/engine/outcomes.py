"""Where a request ends inside what a step brought it: stop ids, stop strings, limits."""

from dataclasses import dataclass, replace

from mtp_jax.core.config import FinishReason
from mtp_jax.engine.requests import Request
from mtp_jax.engine.results import SlotResult


@dataclass(frozen=True)
class Outcome:
    """What of a slot's result reaches its request, and whether the request ends with it."""

    kept: SlotResult
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


def outcome_of(request: Request, result: SlotResult) -> Outcome:
    """A step's result as its request sees it: cut where its watcher says, ended where the device says.

    A watcher that raises ends its own request as "rejected", and nothing else.
    """
    try:
        cut = request.watcher.feed(result.tokens) if request.watcher is not None else None
    except Exception as error:  # a caller's code: it fails its own request, not the loop
        return Outcome(
            _first_tokens(result, 0), FinishReason.REJECTED, error=f"The request's watcher raised {error!r}."
        )
    if cut is not None:
        return Outcome(_first_tokens(result, cut.num_tokens), FinishReason.STOP, cut.stop_reason)
    if not result.finished:
        return Outcome(result)
    last = result.tokens[-1]
    if last not in request.stop_ids:
        return Outcome(result, FinishReason.LENGTH)
    is_callers = last in (request.params.stop_token_ids or ())
    return Outcome(result, FinishReason.STOP, last if is_callers else None)


def _first_tokens(result: SlotResult, num_tokens: int) -> SlotResult:
    """The result as if the step had ended after that many tokens: what was cut off is in no count and no record."""
    return replace(
        result,
        tokens=result.tokens[:num_tokens],
        logprobs=result.logprobs[:num_tokens],
        num_accepted=min(result.num_accepted, num_tokens),
        committed_len=result.committed_len - len(result.tokens[num_tokens:]),
    )
