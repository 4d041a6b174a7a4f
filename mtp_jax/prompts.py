"""What a call of `LLM` is given, in one form: a list of prompts, token ids as integers, parameters for each."""

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids"."""


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list of prompts; what is no prompt in it is left for its own request to name."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ConfigError(f"prompts is {prompts!r}; it must be text, a list of token ids, or a list of these.")
    items = list(prompts)
    is_one = bool(items) and all(isinstance(item, Integral) for item in items)
    return [items] if is_one else items


def checked_tokens(tokens: Any) -> tuple[tuple[Any, ...], str | None]:
    """Token ids as plain integers; what is no integer is left for admission to name."""
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes | Set | Mapping):
        return (), f"The prompt is {tokens!r}; it must be text or a list of token ids."
    return tuple(int(token) if _is_integral(token) else token for token in tokens), None


def _is_integral(token: Any) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def one_params(params: Any) -> SamplingParams:
    """The parameters of one prompt; the defaults for None."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is {params!r}; it must be a SamplingParams.")
    return params


def single_params(params: Any, what: str) -> SamplingParams:
    """The parameters of one prompt; `ConfigError` for more samples than one, which `what` cannot show."""
    one = one_params(params)
    if isinstance(one.n, int) and one.n > 1:
        raise ConfigError(f"n is {one.n}, and {what} shows one sample; it must be 1, or use generate.")
    return one


def params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Parameters for each prompt: the same for all, one each, or the defaults."""
    if params is None:
        return [SamplingParams()] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ConfigError(f"sampling_params is {params!r}; it must be a SamplingParams, or a list with one each.")
    if len(params) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts came with {len(params)} sampling_params; give one, or one each.")
    return list(params)
