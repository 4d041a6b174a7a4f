"""The bodies of requests, by url: which fields there are, and what they mean as prompt and `SamplingParams`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import short

COMPLETIONS_URL, CHAT_URL = "/v1/completions", "/v1/chat/completions"
_SAMPLING = {field.name for field in fields(SamplingParams)}
_WITHOUT_MEANING = {"model", "user", "metadata", "store"}
"""Fields that say who asks, not what for."""

Render = Callable[[Any, Mapping[str, Any] | None], Any]
"""Messages (and what else the template is told) to a prompt; `ValueError` for messages that it does not take."""


@dataclass(frozen=True)
class Body:
    """One url: the field that holds the prompt, the others, and `max_tokens` of a line that does not say."""

    url: str
    prompt_field: str
    convert: Mapping[str, Callable[[Any], Any]]
    default_max_tokens: int | None

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`SamplingParams`' fields, and those of the template. `ValueError` for what this url does not take."""
        if self.prompt_field not in body:
            raise ValueError(f"body has no {self.prompt_field}.")
        known = {self.prompt_field, *self.convert, *_WITHOUT_MEANING}
        found = {name: convert(body[name]) for name, convert in self.convert.items() if body.get(name) is not None}
        unknown = next((name for name in body if name not in known), None)
        if unknown is not None:
            raise ValueError(f"body has {short(unknown)}, which {self.url} does not take here.")
        return found


def chat_options(found: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's names of chat fields as `SamplingParams`'. `ValueError` where two of them contradict each other."""
    options = dict(found)
    longest = options.pop("max_completion_tokens", None)
    if longest is not None and options.setdefault("max_tokens", longest) != longest:
        raise ValueError(f"max_tokens is {short(options['max_tokens'])} and max_completion_tokens {short(longest)}.")
    wants, num_listed = options.pop("logprobs", False), options.pop("top_logprobs", None)
    if num_listed is not None and not wants:
        raise ValueError("top_logprobs needs logprobs: true.")
    if wants:
        options["logprobs"] = 0 if num_listed is None else num_listed
    return options


def _as_is(value: Any) -> Any:
    return value


def _token_biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {short(value)}; it must map token ids to numbers.")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise ValueError(f"logit_bias is {short(value)}; its keys must be token ids.") from None


def _yes_or_no(what: str) -> Callable[[Any], bool]:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{what.format(short(value))} true or false.")
        return value

    return read


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"chat_template_kwargs is {short(value)}; it must be an object.")
    return value


def _off(name: str) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        raise ValueError(f"{name} is {short(value)}, which a batch does not take; leave it out.")

    return refuse


_COMMON: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(sorted(_SAMPLING - {"logit_bias"}), _as_is),
    "logit_bias": _token_biases,
    "return_token_ids": _yes_or_no("return_token_ids is {}; it must be"),
    **{name: _off(name) for name in ("stream", "stream_options", "prompt_logprobs")},
}
BODIES = {
    COMPLETIONS_URL: Body(
        COMPLETIONS_URL,
        "prompt",
        {**_COMMON, **{name: _off(name) for name in ("echo", "suffix", "best_of")}},
        default_max_tokens=16,
    ),
    CHAT_URL: Body(
        CHAT_URL,
        "messages",
        {
            **_COMMON,
            "max_completion_tokens": _as_is,
            "logprobs": _yes_or_no("logprobs is {}; in a conversation it is"),
            "top_logprobs": _as_is,
            "chat_template_kwargs": _mapping,
        },
        default_max_tokens=None,
    ),
}
"""What a line's url may be."""
