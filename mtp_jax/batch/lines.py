"""One line of an OpenAI batch file: what it asks for, or what is wrong with it.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "...", "max_tokens": 16}}

Names are OpenAI's, with vLLM's additions. A field that nobody would honour is an error of its line, never ignored.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mtp_jax.core.config import SamplingParams

COMPLETIONS_URL = "/v1/completions"
_LONGEST_LINE_BYTES = 16 << 20
_SAMPLING = {field.name for field in fields(SamplingParams)}
_WITHOUT_MEANING = {"user", "metadata", "store"}
"""Fields that say who asks, not what for."""


@dataclass(frozen=True)
class Asked:
    """A request: prompt and parameters as `LLM.generate` takes them."""

    custom_id: str
    url: str
    prompt: Any
    params: SamplingParams


@dataclass(frozen=True)
class Refused:
    """A line that asks for nothing that can be done; `custom_id` None where even that could not be read."""

    custom_id: str | None
    message: str


def read_line(raw: bytes, *, model: str, default_max_tokens: int = 16) -> Asked | Refused:
    """What a line asks for.

    >>> line = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}}'
    >>> read_line(line, model="m").params.max_tokens
    3
    >>> read_line(b"nonsense", model="m").message
    'The line is not JSON: Expecting value at column 1.'
    """
    fields_of_line, problem = _parsed(raw)
    if fields_of_line is None:
        return Refused(None, problem)
    custom_id = fields_of_line.get("custom_id")
    if not isinstance(custom_id, str):
        return Refused(None, f"custom_id is {_short(custom_id)}; it must be a string.")
    problem = _problem_of_envelope(fields_of_line)
    if problem is not None:
        return Refused(custom_id, problem)
    body = fields_of_line["body"]
    named = body.get("model", model)
    if named != model:
        return Refused(custom_id, f"model is {_short(named)}; this run serves {model!r}.")
    if "prompt" not in body:
        return Refused(custom_id, "body has no prompt.")
    try:
        options = {name: convert(body[name]) for name, convert in _FIELDS.items() if body.get(name) is not None}
    except (TypeError, ValueError) as error:
        return Refused(custom_id, f"{error}")
    unknown = [name for name in body if name not in _FIELDS and name not in {"model", "prompt", *_WITHOUT_MEANING}]
    if unknown:
        return Refused(custom_id, f"body has {_short(unknown[0])}, which {COMPLETIONS_URL} does not take here.")
    options.setdefault("max_tokens", default_max_tokens)
    options.setdefault("seed", seed_of(raw, 0))
    return Asked(custom_id, COMPLETIONS_URL, body["prompt"], SamplingParams(**options))


def seed_of(raw: bytes, sample: int) -> int:
    """The seed of a line that names none: of its bytes and the sample's number, so of no neighbour and no run."""
    digest = hashlib.sha256(raw.rstrip(b"\r\n") + sample.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def _parsed(raw: bytes) -> tuple[dict[str, Any] | None, str]:
    if len(raw) > _LONGEST_LINE_BYTES:
        return None, f"The line has {len(raw)} bytes; at most {_LONGEST_LINE_BYTES} are read."
    try:
        parsed = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"The line is not UTF-8: byte {error.start} does not fit."
    except json.JSONDecodeError as error:
        return None, f"The line is not JSON: {error.msg} at column {error.colno}."
    except (RecursionError, ValueError) as error:
        return None, f"The line cannot be read as JSON: {type(error).__name__}."
    if not isinstance(parsed, dict):
        return None, f"The line holds a {type(parsed).__name__}; it must be a JSON object."
    return parsed, ""


def _problem_of_envelope(line: Mapping[str, Any]) -> str | None:
    unknown = [name for name in line if name not in ("custom_id", "method", "url", "body")]
    if unknown:
        return f"The line has the field {_short(unknown[0])}; it takes custom_id, method, url and body."
    if line.get("method", "POST") != "POST":
        return f"method is {_short(line['method'])}; it must be 'POST'."
    if line.get("url") != COMPLETIONS_URL:
        return f"url is {_short(line.get('url'))}; it must be '{COMPLETIONS_URL}'."
    if not isinstance(line.get("body"), dict):
        return f"body is {_short(line.get('body'))}; it must be a JSON object."
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _as_is(value: Any) -> Any:
    return value


def _token_biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {_short(value)}; it must map token ids to numbers.")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise ValueError(f"logit_bias is {_short(value)}; its keys must be token ids.") from None


def _off(name: str) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        raise ValueError(f"{name} is {_short(value)}, which a batch does not take; leave it out.")

    return refuse


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(sorted(_SAMPLING - {"logit_bias"}), _as_is),
    "logit_bias": _token_biases,
    **{name: _off(name) for name in ("stream", "stream_options", "echo", "suffix", "best_of", "prompt_logprobs")},
}
"""Fields of a body that mean something, and what makes `SamplingParams`' values of them."""
