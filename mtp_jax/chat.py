"""Conversations as prompts: the Jinja chat template that comes with a tokenizer, rendered in a sandbox.

A template is code of whoever made the model, and messages are whatever a line of a file says: both are kept from
everything but each other. What templates may use is what transformers gives them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtp_jax.core.errors import ConfigError, short

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]
    digest: str
    """Of its text: the same template, the same prompts."""

    @classmethod
    def compiled(cls, source: str, special_tokens: Mapping[str, str], where: Path) -> "ChatTemplate":
        """From its text; `ConfigError` for one that Jinja cannot read."""
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        try:
            return cls(_environment().from_string(source), special_tokens, digest)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {where} is not valid: {error}.") from None

    def render(self, messages: Any, more: Mapping[str, Any] | None = None) -> str:
        """The conversation as the model was trained to see it, up to where the assistant begins to speak.

        `ValueError` with a sentence for messages that are none, or that the template refuses.

        >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> template = ChatTemplate.compiled(source, {}, Path("x"))
        >>> template.render([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        '<user>hi'
        """
        values = {**self.special_tokens, **(more or {}), "messages": checked_messages(messages)}
        values.setdefault("add_generation_prompt", True)
        try:
            return self.template.render(values)
        except Exception as error:  # whatever a template does wrong is its line's matter
            raise ValueError(f"The chat template does not take these messages: {error}") from None


def load_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The template of `file`, else the one beside the tokenizer in `folder`; None where there is none."""
    config = _tokenizer_config(folder)
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    beside = folder / TEMPLATE_FILE
    if file is None and beside.is_file():
        file = beside
    if file is not None:
        try:
            return ChatTemplate.compiled(file.read_text(encoding="utf-8"), special, file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {file} cannot be read: {error}.") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        by_name = {one.get("name"): one.get("template") for one in source if isinstance(one, Mapping)}
        source = by_name.get("default")
    return ChatTemplate.compiled(source, special, folder / CONFIG_FILE) if isinstance(source, str) else None


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages whose content is plain text; `ValueError` for what is none.

    A content in parts is joined, if all of them are text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages is {short(messages)}; it must be a list of at least one message.")
    return [_checked(message, place) for place, message in enumerate(messages)]


def _checked(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{place}] is {short(message)}; it must be an object with a role.")
    unknown = [name for name in message if name not in ("role", "content", "name")]
    if unknown:
        raise ValueError(f"messages[{place}] has {short(unknown[0])}; a message takes role, content and name.")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(_text_of(part, place) for part in content)}
    if not isinstance(content, str):
        raise ValueError(f"messages[{place}].content is {short(content)}; it must be text, or parts of type 'text'.")
    return dict(message)


def _text_of(part: Any, place: int) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(f"messages[{place}] has a part of type {short(kind)}; only 'text' is served here.")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"messages[{place}] has a part whose text is {short(part.get('text'))}.")
    return part["text"]


def _tokenizer_config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from None
    return config if isinstance(config, dict) else {}


def _token_text(token: Any) -> str | None:
    """A special token is its text, or an object with its text."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's words for training; here they are just words."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's content in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Jinja's own would write HTML escapes, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
