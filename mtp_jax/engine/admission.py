"""Whether a request can be served at all: one sentence why not, for that request alone."""

# pyright: reportUnnecessaryIsInstance=false
# What a user passes need not have the type it is annotated with; these checks are what says so.

from collections.abc import Sequence

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.rule_facts import RULE_FACTS, facts_of
from mtp_jax.core.sampling_params import RequestLimits
from mtp_jax.engine.pages import pages_for
from mtp_jax.engine.requests import Request


def problem_with(request: Request, config: EngineConfig, *, vocab_size: int) -> str | None:
    """The first reason to refuse the request, or None."""
    limits = RequestLimits(
        vocab_size=vocab_size,
        max_logprobs=min(config.max_logprobs, vocab_size),
        max_stop_token_ids=config.max_stop_token_ids - len(request.eos_token_ids),
        lists=config.list_sizes,
    )
    return (
        request.params.problem(limits)
        or _not_one_sample(request)
        or _no_token_left(request, vocab_size)
        or _useless_thinking_tokens(request, config)
        or _bad_prompt(request, config, vocab_size)
        or _too_large(request, config)
    )


def _not_one_sample(request: Request) -> str | None:
    num_samples = request.params.n
    return None if num_samples == 1 else f"n is {num_samples}, and a request to an engine is one sample; it must be 1."


def _no_token_left(request: Request, vocab_size: int) -> str | None:
    """Greedy or not, something must be left to write whatever the text.

    Bad words are banned together where their beginnings end one text: where each is an end of the longest of them. A
    beginning that has a bad word in it is never written.
    """
    params = request.params
    words = [tuple(word) for word in params.bad_words or ()]
    for written in sorted({(), *(word[:-1] for word in words)}):
        if any(_ends_with(written[:end], word) for word in words for end in range(1, len(written) + 1)):
            continue
        banned = {last for *beginning, last in words if _ends_with(written, beginning)}
        if len(written) < params.min_tokens:
            banned |= {*request.held_back_ids}
        if len(banned) == vocab_size:
            after = f" after {[*written]}" if written else ""
            return f"bad_words and min_tokens would ban all {vocab_size} tokens of the vocabulary{after}; leave one."
    return None


def _ends_with(text: Sequence[object], end: Sequence[object]) -> bool:
    return len(end) <= len(text) and [*text[len(text) - len(end) :]] == [*end]


def _useless_thinking_tokens(request: Request, config: EngineConfig) -> str | None:
    rule = config.speculative.acceptance
    if request.params.thinking_token_ids is None or facts_of(rule).reads_thinking:
        return None
    readers = " or ".join(f'"{name}"' for name, facts in RULE_FACTS.items() if facts.reads_thinking)
    return f"thinking_token_ids goes with acceptance={readers}, and this engine has {rule!r}; leave it out."


def _bad_prompt(request: Request, config: EngineConfig, vocab_size: int) -> str | None:
    if not request.prompt:
        return "The prompt is empty; it needs at least one token."
    longest = config.max_model_len - 1
    if len(request.prompt) > longest:
        return (
            f"The prompt has {len(request.prompt)} tokens; with max_model_len={config.max_model_len} "
            f"at most {longest} leave room for an output token."
        )
    for token in request.prompt:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            return f"The prompt contains token id {token!r}; ids are integers from 0 to {vocab_size - 1}."
    return None


def _too_large(request: Request, config: EngineConfig) -> str | None:
    num_tokens = request.longest_text(config.max_model_len)
    needed = pages_for(num_tokens - 1, config.cache.page_size)
    if needed > config.pages_per_shard:
        has = "the cache has" if config.mesh.data == 1 else "the cache of a data shard has"
        return (
            f"The request needs {needed} KV blocks of {config.cache.page_size} tokens for its {num_tokens} tokens; "
            f"{has} {config.pages_per_shard}. Lower max_tokens or raise num_kv_blocks."
        )
    return None
