"""One line of an OpenAI batch file: what it asks for, or what is wrong with it.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "...", "max_tokens": 16}}

Names are OpenAI's, with vLLM's additions. A field that nobody would honour is an error of its line, never ignored.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_jax.batch.bodies import BODIES, CHAT_URL, Render, chat_options
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import short

LONGEST_LINE_BYTES = 16 << 20
_NO_TEMPLATE = "The tokenizer has no chat template; give one with --chat-template FILE, or ask /v1/completions."


@dataclass(frozen=True)
class Asked:
    """A request: prompt and parameters as `LLM.generate` takes them."""

    custom_id: str
    url: str
    prompt: Any
    params: SamplingParams
    returns_token_ids: bool = False  # the prompt's, too; those of the completion are always there


@dataclass(frozen=True)
class Refused:
    """A line that asks for nothing that can be done; `custom_id` None where even that could not be read."""

    custom_id: str | None
    message: str


def read_line(raw: bytes, *, model: str, render: Render | None = None) -> Asked | Refused:
    """What a line asks for. `render` makes prompts of conversations; None: there is no chat template.

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
        return Refused(None, f"custom_id is {short(custom_id)}; it must be a string.")
    problem = _problem_of_envelope(fields_of_line)
    if problem is not None:
        return Refused(custom_id, problem)
    url, body = fields_of_line["url"], fields_of_line["body"]
    named = body.get("model", model)
    if named != model:
        return Refused(custom_id, f"model is {short(named)}; this run serves {model!r}.")
    try:
        options = BODIES[url].read(body)
        prompt = body[BODIES[url].prompt_field]
        if url == CHAT_URL:
            options, prompt = _conversation(options, prompt, render)
    except (TypeError, ValueError) as error:
        return Refused(custom_id, f"{error}")
    options.setdefault("max_tokens", BODIES[url].default_max_tokens)
    options.setdefault("seed", seed_of(raw, 0))
    returns_token_ids = options.pop("return_token_ids", False)
    return Asked(custom_id, url, prompt, SamplingParams(**options), returns_token_ids)


def _conversation(options: dict[str, Any], messages: Any, render: Render | None) -> tuple[dict[str, Any], Any]:
    if render is None:
        raise ValueError(_NO_TEMPLATE)
    prompt = render(messages, options.pop("chat_template_kwargs", None))
    return chat_options(options), prompt


def seed_of(raw: bytes, sample: int) -> int:
    """The seed of a line that names none: of its bytes and the sample's number, so of no neighbour and no run."""
    digest = hashlib.sha256(raw.rstrip(b"\r\n") + sample.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def _parsed(raw: bytes) -> tuple[dict[str, Any] | None, str]:
    if len(raw) > LONGEST_LINE_BYTES:
        return None, f"The line has more than the {LONGEST_LINE_BYTES} bytes that are read."
    try:
        parsed = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"The line is not UTF-8: byte {error.start} does not fit."
    except json.JSONDecodeError as error:
        return None, f"The line is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}."
    except (RecursionError, ValueError) as error:
        return None, f"The line cannot be read as JSON: {type(error).__name__}."
    if not isinstance(parsed, dict):
        return None, f"The line holds a {type(parsed).__name__}; it must be a JSON object."
    return parsed, ""


def _problem_of_envelope(line: Mapping[str, Any]) -> str | None:
    unknown = [name for name in line if name not in ("custom_id", "method", "url", "body")]
    if unknown:
        return f"The line has the field {short(unknown[0])}; it takes custom_id, method, url and body."
    if line.get("method", "POST") != "POST":
        return f"method is {short(line['method'])}; it must be 'POST'."
    url = line.get("url")
    if not isinstance(url, str) or url not in BODIES:
        return f"url is {short(url)}; it must be {' or '.join(map(repr, BODIES))}."
    if not isinstance(line.get("body"), dict):
        return f"body is {short(line.get('body'))}; it must be a JSON object."
    return None
