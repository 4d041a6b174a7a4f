"""Requests whose text follows from their number, and what must come of them: no model is needed to know it."""

from mtp_jax.core.config import EngineConfig, FinishReason, SamplingParams
from mtp_jax.engine.requests import Progress, Request
from mtp_jax.testing.checks import CheckFailed, check_trace

VOCAB_SIZE = 101
STOP_ID = 100


def numbered_request(number: int, *, prompt_len: int, max_tokens: int, stop_after: int | None = None) -> Request:
    """A request whose text is known: see `text_token`. With `stop_after` its token of that index (from 0) is a stop.

    Numbers that are equal modulo 100 have the same text, so such requests can share the pages of their prompts.
    """
    prompt = tuple(text_token(number, position, None) for position in range(prompt_len))
    return Request(
        request_id=str(number),
        prompt=prompt,
        params=SamplingParams(max_tokens=max_tokens, stop_token_ids=() if stop_after is None else (STOP_ID,)),
        seed=prompt_len + stop_after if stop_after is not None else 2**32,
        wants_trace=True,
    )


def text_token(number: int, position: int, stop_position: int | None) -> int:
    """The token that the text of request `number` has at `position`."""
    return STOP_ID if position == stop_position else (number * 17 + position * 5) % (VOCAB_SIZE - 1)


def expected_end(request: Request, max_model_len: int) -> tuple[tuple[int, ...], FinishReason]:
    """Tokens and finish reason of a `numbered_request`, by definition."""
    first = len(request.prompt)
    last = request.longest_text(max_model_len)
    tokens = [text_token(int(request.request_id), position, request.seed) for position in range(first, last)]
    if STOP_ID in tokens:
        return tuple(tokens[: tokens.index(STOP_ID) + 1]), FinishReason.STOP
    return tuple(tokens), FinishReason.LENGTH


class Outcomes:
    """What requests must bring, and what they brought."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Progress] = {}

    def take(self, progress: Progress) -> None:
        """Checks a request's progress, and all of it at its end."""
        if progress.request_id not in self.requests:
            raise CheckFailed(f"request {progress.request_id} left, and was heard of again")
        if progress.finish_reason is not None:
            self.finished[progress.request_id] = progress
            self._check_finished(progress, self.requests[progress.request_id])

    def _check_finished(self, progress: Progress, request: Request) -> None:
        state = progress.state
        if (tuple(state.tokens), progress.finish_reason) != expected_end(request, self._config.max_model_len):
            raise CheckFailed(f"request {request.request_id} ended with {state.tokens}, {progress.finish_reason}")
        check_trace(
            state.records,
            state.tokens,
            prompt_len=len(request.prompt),
            limit=state.limit,
            stop_ids=request.stop_ids,
            page_size=self._config.cache.page_size,
        )
