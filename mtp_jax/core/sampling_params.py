"""How one request wants its tokens: vLLM's `SamplingParams`, and one sentence on the first of them that cannot be."""

# pyright: reportUnnecessaryIsInstance=false
# What a user passes need not have the type it is annotated with; these checks are what says so.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_jax.core.layout import ListSizes
from mtp_jax.core.requirements import is_int, is_real

FLOAT32_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
"""The device computes in float32: outside of this a number would silently become 0 or infinite."""
MAX_SAMPLES = 16_384
"""The largest `n`, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What bounds the parameters of a request: the model's vocabulary, and the room that each slot has."""

    vocab_size: int
    max_logprobs: int
    max_stop_token_ids: int
    lists: ListSizes


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens. Names, defaults and meanings are vLLM's.

    Logits are changed in this order: `bad_words`, `min_tokens` (stop and end-of-text ids are banned before, the latter
    under `ignore_eos` too), `logit_bias`, penalties; then, above temperature 0, `temperature`, `min_p`, `top_k` (0 or
    -1: off), `top_p`. `bad_words` may be given as token ids too. `max_tokens` None: up to the engine's longest text.
    Nothing is checked here: `problem` is called when the request is admitted, so that one bad request fails alone.

    `temperature`: 0 is greedy. `top_k`: draw among so many of the likeliest tokens, 0 is all; `top_p`, `min_p`: shares
    of probability. `seed`: same seed, same tokens; None: the engine's, by the request's place in its call.
    `max_tokens`, `min_tokens`: tokens of the answer. It also ends before a text of `stop`, and at an id of
    `stop_token_ids` or, unless `ignore_eos`, of the model's. `n`: samples of one prompt.
    `logprobs`: list each token's log-probability, and those of so many of the likeliest in its place (natural
    logarithms of the model's own law); `prompt_logprobs`: of the prompt's tokens.
    `presence_penalty` and `frequency_penalty` are subtracted from the logits of tokens that were written, once and as
    often as they were; `repetition_penalty` divides positive logits, and multiplies negative ones, of tokens of prompt
    and answer (1: off). `logit_bias`: added to the logits of these ids.

    `thinking_token_ids`: the tokens that begin and end the part of the text in which `acceptance="relaxed"` is relaxed;
    the last of them in the text so far counts, prompt included. None: it never is.

    >>> SamplingParams(temperature=0, max_tokens=64).stop_strings
    ()
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    n: int = 1
    thinking_token_ids: Sequence[int] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop) if isinstance(self.stop, Sequence) else ()  # `problem` names what is neither

    @property
    def edits_logits(self) -> bool:
        """Whether even greedy decoding looks at other logits than the model's own."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.bad_words
        )

    def problem(self, limits: RequestLimits) -> str | None:
        """One sentence on the first parameter that cannot be honoured, or None when all can.

        >>> limits = RequestLimits(vocab_size=8, max_logprobs=5, max_stop_token_ids=4, lists=ListSizes(2, 2, 4))
        >>> SamplingParams(top_k=-3).problem(limits)
        'top_k is -3; it must be a positive integer, or 0 or -1 (off).'
        """
        return (
            self._bad_filter()
            or self._bad_penalty()
            or self._bad_length()
            or self._bad_logprobs(limits.max_logprobs)
            or self._bad_stop(limits)
            or self._bad_bias(limits)
            or self._bad_words(limits)
            or self._bad_thinking_tokens(limits.vocab_size)
        )

    def _bad_filter(self) -> str | None:
        smallest, largest = FLOAT32_RANGE
        if not is_real(self.temperature) or not (self.temperature == 0 or smallest <= self.temperature <= largest):
            return (
                f"temperature is {self.temperature!r}; it must be 0 (greedy) or a finite number "
                f"from {smallest:.2g} to {largest:.2g}."
            )
        if not is_int(self.top_k) or self.top_k < -1:
            return f"top_k is {self.top_k!r}; it must be a positive integer, or 0 or -1 (off)."
        if not is_real(self.top_p) or not smallest <= self.top_p <= 1:
            return f"top_p is {self.top_p!r}; it must be above 0 (at least {smallest:.2g}) and at most 1."
        if not is_real(self.min_p) or not (self.min_p == 0 or smallest <= self.min_p <= 1):
            return f"min_p is {self.min_p!r}; it must be 0 (off) or a number up to 1 (at least {smallest:.2g})."
        if self.seed is not None and (not is_int(self.seed) or not 0 <= self.seed < 2**64):
            return f"seed is {self.seed!r}; it must be None or an integer from 0 to 2**64 - 1."
        return None

    def _bad_penalty(self) -> str | None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_real(value) or not -2 <= value <= 2:
                return f"{name} is {value!r}; it must be a number from -2 to 2."
        smallest, largest = FLOAT32_RANGE
        if not is_real(self.repetition_penalty) or not smallest <= self.repetition_penalty <= largest:
            return (
                f"repetition_penalty is {self.repetition_penalty!r}; it must be above 0, "
                f"a finite number from {smallest:.2g} to {largest:.2g} (1 is off)."
            )
        return None

    def _bad_length(self) -> str | None:
        longest = self.max_tokens
        if longest is not None and (not is_int(longest) or longest < 1):
            return (
                f"max_tokens is {longest!r}; it must be None (no limit but the engine's) or an integer of at least 1."
            )
        if not is_int(self.min_tokens) or self.min_tokens < 0 or (longest is not None and self.min_tokens > longest):
            most = "" if longest is None else f" to max_tokens={longest}"
            return f"min_tokens is {self.min_tokens!r}; it must be an integer from 0{most or ' on'}."
        if not is_int(self.n) or not 1 <= self.n <= MAX_SAMPLES:
            return f"n is {self.n!r}; it must be an integer from 1 to {MAX_SAMPLES}."
        if self.n > 1 and self.temperature == 0:
            return f"n is {self.n!r} at temperature 0, where all samples would be the same; it must be 1."
        return None

    def _bad_logprobs(self, max_logprobs: int) -> str | None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or not 0 <= value <= max_logprobs):
                return f"{name} is {value!r}; it must be None or an integer from 0 to {max_logprobs}."
        return None

    def _bad_stop(self, limits: RequestLimits) -> str | None:
        if not isinstance(self.ignore_eos, bool):
            return f"ignore_eos is {self.ignore_eos!r}; it must be True or False."
        if self.stop is not None and not isinstance(self.stop, str | Sequence):
            return f"stop is {self.stop!r}; it must be a string or a list of strings."
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                return f"stop contains {text!r}; every stop must be a string of at least one character."
        ids = self.stop_token_ids
        if ids is None:
            return None
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            return f"stop_token_ids is {ids!r}; it must be a list of token ids."
        if len(ids) > limits.max_stop_token_ids:
            return f"stop_token_ids has {len(ids)} entries; at most {limits.max_stop_token_ids} fit a request."
        return _bad_token("stop_token_ids", ids, limits.vocab_size)

    def _bad_bias(self, limits: RequestLimits) -> str | None:
        bias = self.logit_bias
        if bias is None:
            return None
        if not isinstance(bias, Mapping):
            return f"logit_bias is {bias!r}; it must map token ids to numbers."
        if len(bias) > limits.lists.num_biases:
            return f"logit_bias has {len(bias)} entries; at most {limits.lists.num_biases} fit a request."
        largest = FLOAT32_RANGE[1]
        for token, value in bias.items():
            if not is_real(value) or not -largest <= value <= largest:
                return f"logit_bias[{token!r}] is {value!r}; it must be a finite number within {largest:.2g}."
        return _bad_token("logit_bias", tuple(bias), limits.vocab_size)

    def _bad_words(self, limits: RequestLimits) -> str | None:
        words = self.bad_words
        if words is None:
            return None
        if isinstance(words, str) or not isinstance(words, Sequence):
            return f"bad_words is {words!r}; it must be a list of strings, or of lists of token ids."
        if len(words) > limits.lists.num_bad_words:
            return f"bad_words has {len(words)} entries as tokens; at most {limits.lists.num_bad_words} fit a request."
        for word in words:
            if isinstance(word, str):
                return f"bad_words contains {word!r}, and a model without a tokenizer takes lists of token ids."
            if not isinstance(word, Sequence) or not word:
                return f"bad_words contains {word!r}; every bad word must be text or a list of at least one token id."
            longest = limits.lists.bad_word_len
            if len(word) > longest:
                return f"bad_words contains a word of {len(word)} tokens; at most {longest} fit."
            problem = _bad_token("bad_words", word, limits.vocab_size)
            if problem is not None:
                return problem
        return None

    def _bad_thinking_tokens(self, vocab_size: int) -> str | None:
        ids = self.thinking_token_ids
        if ids is None:
            return None
        if not isinstance(ids, list | tuple) or len(ids) != 2 or ids[0] == ids[1]:
            return (
                f"thinking_token_ids is {ids!r}; it must be None or two different token ids: "
                "the one that begins a thinking part and the one that ends it."
            )
        return _bad_token("thinking_token_ids", ids, vocab_size)


def _bad_token(name: str, ids: Sequence[object], vocab_size: int) -> str | None:
    for token in ids:
        if not is_int(token) or not 0 <= token < vocab_size:  # type: ignore[operator]
            return f"{name} contains {token!r}; token ids are integers from 0 to {vocab_size - 1}."
    return None
