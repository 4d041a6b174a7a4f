"""What `LLM.generate` returns. Field names follow vLLM's."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from mtp_jax.engine.requests import RequestMetrics, StepRecord, TokenLogprob


@dataclass(frozen=True)
class Logprob:
    """`logprob`: natural logarithm of a token's probability under the model's own law, before temperature and filters.

    `rank`: 1 for the most likely token. `decoded_token`: its text, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence. `error` is set, and the rest empty, when `finish_reason` is "rejected".

    `index`: which of the request's `n` samples. `text`: of `token_ids`, up to a stop string; empty without a tokenizer.
    `finish_reason`: "stop" (`stop_reason`: which id or string; None: the model's end of text), "length" or "rejected".
    `logprobs`: for each token a dict of token id to `Logprob`, itself and the likeliest; None unless asked for.
    `is_lossy`: the configuration lets tokens stand that plain decoding would not write, or not as often. `records`: its
    decode steps, where they were asked for; the first token is the prefill's.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    is_lossy: bool = False
    records: list[StepRecord] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the emitted tokens, or None when log-probabilities were not asked for."""
        if self.logprobs is None:
            return None
        return sum(step[token].logprob for step, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """Everything about one request, in the order it was given.

    `request_id`: the engine's own name for it. `prompt`: the text given, None for ids; `prompt_token_ids`: what
    was fed. `finished` is True: what is not finished is not returned. `outputs` has an entry for each of
    `SamplingParams.n` samples, and `metrics` counts all of them. `prompt_logprobs` has one for each prompt token,
    as `CompletionOutput.logprobs` has for output tokens; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def listed_logprobs(
    logprobs: list[TokenLogprob], num_listed: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """vLLM's form: for each token a dict of the `num_listed` most likely tokens and itself."""

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    listed = list[dict[int, Logprob]]()
    for entry in logprobs:
        top = {
            token: Logprob(logprob, rank, text(token))
            for rank, (token, logprob) in enumerate(entry.top[:num_listed], start=1)
        }
        top[entry.token] = Logprob(entry.logprob, entry.rank, text(entry.token))
        listed.append(top)
    return listed
