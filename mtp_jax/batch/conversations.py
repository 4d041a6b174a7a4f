"""Conversations as prompts of `LLM.generate`: the chat template's text, in tokens."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from mtp_jax.batch.bodies import Render
from mtp_jax.chat import ChatTemplate
from mtp_jax.text import encode


def renderer(template: ChatTemplate | None, tokenizer: Tokenizer | None) -> Render | None:
    """What `read_line` makes prompts of conversations with; None without a template or a tokenizer.

    Special tokens are those that the template writes: the tokenizer adds none of its own.
    """
    if template is None or tokenizer is None:
        return None

    def render(messages: Any, more: Mapping[str, Any] | None) -> dict[str, Any]:
        text = template.render(messages, more)
        return {"prompt": text, "prompt_token_ids": encode(tokenizer, text, add_special_tokens=False)}

    return render
