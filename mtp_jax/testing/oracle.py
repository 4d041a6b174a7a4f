"""Plain decoding, one token at a time and by definition: what every engine must emit, however it drafts.

Nothing here knows of slots, pages, drafts or steps. The text after a prompt is defined by a function from tokens to
next-token logits, by the request's sampling parameters, and by the request's noise (`ops.sampling.gumbel_noise` of its
seed). What edits and filters logits is written out in numpy, by counting and sorting, apart from the engine's own.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mtp_jax.core.config import FinishReason, SamplingParams
from mtp_jax.engine.requests import Request
from mtp_jax.ops.sampling import Stream, gumbel_noise

NextLogits = Callable[[Sequence[int]], Float[np.ndarray, " V"]]
"""Next-token logits after a list of tokens, such as `ToyFamily.plain_logits`."""

_NOISE_BLOCK = 64  # positions drawn at once, so that few shapes are compiled


@dataclass(frozen=True)
class PlainResult:
    """What a request must bring. `logprobs[i]` is the raw log-softmax of `tokens[i]`."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | None
    logprobs: tuple[float, ...]


def plain_decode(next_logits: NextLogits, request: Request, *, max_model_len: int) -> PlainResult:
    """The request's tokens, and why they end; `request.watcher` is not asked.

    The last token is the first one that is a stop id, or the `max_tokens`-th, or the one that fills `max_model_len`.

    >>> request = Request("a", (1, 2), SamplingParams(temperature=0, max_tokens=3), seed=0)
    >>> plain_decode(lambda tokens: np.eye(8)[len(tokens)], request, max_model_len=32).tokens
    (2, 3, 4)
    """
    params = request.params
    num_tokens = request.longest_text(max_model_len) - len(request.prompt)
    text, logprobs = list(request.prompt), []
    for _ in range(num_tokens):
        logits_V = next_logits(text)
        token = plain_token(logits_V, request, text)
        text.append(token)
        logprobs.append(float(log_softmax(logits_V)[token]))
        if token in request.stop_ids:
            break
    tokens = tuple(text[len(request.prompt) :])
    is_stop = tokens[-1] in request.stop_ids
    return PlainResult(
        tokens=tokens,
        finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
        stop_reason=tokens[-1] if is_stop and tokens[-1] in (params.stop_token_ids or ()) else None,
        logprobs=tuple(logprobs),
    )


def plain_token(logits_V: Float[np.ndarray, " V"], request: Request, text: Sequence[int]) -> int:
    """The request's token after `text`, which begins with its prompt.

    At temperature 0 the most likely by the edited logits (lowest id of equals), else argmax(filtered logits + noise).
    """
    edited_V = edited_logits(logits_V, request, text)
    if request.params.temperature == 0:
        return int(np.argmax(edited_V))
    noise_V = target_noise_at(request.seed, len(text), len(logits_V))
    return int(np.argmax(filtered_logits(edited_V, request.params) + noise_V))


def plain_drafts(
    draft_logits: NextLogits, request: Request, text: Sequence[int], num_drafts: int, *, is_coupled: bool = True
) -> tuple[int, ...]:
    """What a drafter that knows all of `text` proposes next, each draft given those before it.

    Coupled drafts are drawn like the request's own tokens, with the same noise; the others are the most likely tokens.
    """
    longer = list(text)
    for _ in range(num_drafts):
        logits_V = draft_logits(longer)
        longer.append(plain_token(logits_V, request, longer) if is_coupled else int(np.argmax(logits_V)))
    return tuple(longer[len(text) :])


def plain_lookup(text: Sequence[int], num_drafts: int, max_match: int) -> tuple[tuple[int, ...], int]:
    """What prompt lookup copies after `text`, and the length of the match; `((), 0)` where its last token is new.

    The copy begins after the earlier place that ends most like the text, of equals the latest, and goes on into itself.

    >>> plain_lookup([5, 6, 7, 5, 6], 4, max_match=3)
    ((7, 5, 6, 7), 2)
    """
    best_len, best_end = 0, -1
    for end in range(1, len(text)):
        match_len = 0
        while match_len < min(max_match, end) and text[end - 1 - match_len] == text[len(text) - 1 - match_len]:
            match_len += 1
        if match_len >= max(best_len, 1):
            best_len, best_end = match_len, end
    if best_len == 0:
        return (), 0
    longer = list(text)
    for index in range(num_drafts):
        longer.append(longer[best_end + index])
    return tuple(longer[len(text) :]), best_len


def edited_logits(logits_V: Float[np.ndarray, " V"], request: Request, text: Sequence[int]) -> Float[np.ndarray, " V"]:
    """Logits after bad words, min_tokens, logit bias and penalties, for the token after `text`; banned: -inf.

    Frequency and presence penalty, bad words and min_tokens look at what was written, the repetition penalty at the
    prompt as well.

    >>> request = Request("a", (0,), SamplingParams(repetition_penalty=2.0, presence_penalty=0.5), seed=0)
    >>> edited_logits(np.array([8.0, 4.0, -4.0, 1.0]), request, [0, 1, 2, 2]).tolist()
    [4.0, 1.5, -8.5, 1.0]
    """
    params, written = request.params, list(text[len(request.prompt) :])
    edited_V = logits_V.astype(np.float32)
    for *beginning, last in params.bad_words or ():
        if written[max(len(written) - len(beginning), 0) :] == list(beginning):
            edited_V[last] = -np.inf  # type: ignore[call-overload]
    if len(written) < params.min_tokens:
        edited_V[list(request.held_back_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        edited_V[token] += np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token in set(text):
        edited_V[token] *= 1 / repetition if edited_V[token] > 0 else repetition
    for token, count in Counter(written).items():
        edited_V[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        edited_V[token] -= np.float32(params.presence_penalty)
    return edited_V


def filtered_logits(logits_V: Float[np.ndarray, " V"], params: SamplingParams) -> Float[np.ndarray, " V"]:
    """Logits over temperature, then min-p, top-k, top-p; -inf where filtered out. What equals the last kept stays too.

    >>> filtered_logits(np.array([1.0, 3.0, 2.0]), SamplingParams(top_k=2)).tolist()
    [-inf, 0.0, -1.0]
    """
    scaled_V = (logits_V.astype(np.float32) - logits_V.max().astype(np.float32)) / np.float32(params.temperature)
    if params.min_p > 0:
        scaled_V = np.where(scaled_V >= np.log(np.float32(params.min_p)), scaled_V, -np.inf)
    if params.top_k > 0:
        kth_largest = np.sort(scaled_V)[-min(params.top_k, len(scaled_V))]
        scaled_V = np.where(scaled_V >= kth_largest, scaled_V, -np.inf)
    if params.top_p < 1:
        descending_V = np.sort(scaled_V)[::-1]
        mass_V = np.cumsum(np.exp(descending_V, dtype=np.float64))
        last_kept = int(np.argmax(mass_V >= params.top_p * mass_V[-1]))
        scaled_V = np.where(scaled_V >= descending_V[last_kept], scaled_V, -np.inf)
    return scaled_V


def log_softmax(logits_V: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
    """Log-probabilities, in float64."""
    shifted_V = logits_V.astype(np.float64) - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def target_noise_at(seed: int, position: int, vocab_size: int) -> Float[np.ndarray, " V"]:
    """The TARGET noise of a request's token at `position`."""
    block = position // _NOISE_BLOCK
    return _noise_block(seed, block, vocab_size)[position % _NOISE_BLOCK]


@functools.lru_cache(maxsize=1024)
def _noise_block(seed: int, block: int, vocab_size: int) -> Float[np.ndarray, "S V"]:
    key_12 = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    positions_1S = np.arange(block * _NOISE_BLOCK, (block + 1) * _NOISE_BLOCK, dtype=np.int32)[None, :]
    return np.asarray(_jitted_noise(key_12, positions_1S, vocab_size))[0]


@functools.partial(jax.jit, static_argnums=2)
def _jitted_noise(key_12: jax.Array, positions_1S: jax.Array, vocab_size: int) -> jax.Array:
    return gumbel_noise(key_12, positions_1S, Stream.TARGET, jnp.arange(vocab_size, dtype=jnp.int32))
