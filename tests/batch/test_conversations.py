"""Lines for /v1/chat/completions: what they ask for, and results in OpenAI's form of a conversation."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.batch.conversations import renderer
from mtp_jax.batch.lines import Asked, Refused, read_line
from mtp_jax.batch.results import answered
from mtp_jax.chat import ChatTemplate
from mtp_jax.outputs import CompletionOutput, Logprob, RequestOutput
from tests.cli.conftest import save_tokenizer

SOURCE = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"


def chat_line(**body: Any) -> bytes:
    said = {"messages": [{"role": "user", "content": "ab"}], **body}
    return json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": said}).encode()


@pytest.fixture
def read(tmp_path: Path) -> Any:
    render = renderer(ChatTemplate.compiled(SOURCE, {"mark": "."}, tmp_path), save_tokenizer(tmp_path))
    return lambda raw: read_line(raw, model="m", render=render)


def test_a_conversation_is_a_prompt_in_tokens(read: Any) -> None:
    asked = read(chat_line(max_completion_tokens=3, logprobs=True, top_logprobs=2, chat_template_kwargs={"mark": ","}))
    assert isinstance(asked, Asked)
    assert asked.prompt == {"prompt": "ab,", "prompt_token_ids": [0, 1, 28]}
    assert (asked.params.max_tokens, asked.params.logprobs) == (3, 2)
    whole = read(chat_line())
    assert whole.params.max_tokens is None
    assert whole.params.logprobs is None
    assert read(chat_line(logprobs=True)).params.logprobs == 0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"prompt": "x"}, "body has 'prompt', which /v1/chat/completions does not take here."),
        ({"tools": []}, "body has 'tools', which /v1/chat/completions does not take here."),
        ({"logprobs": 3}, "logprobs is 3; in a conversation it is true or false."),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs: true."),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is 3 and max_completion_tokens 4."),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs is 1; it must be an object."),
        ({"messages": "x"}, "messages is 'x'; it must be a list of at least one message."),
    ],
)
def test_what_a_conversation_may_not_ask_is_named(read: Any, body: dict[str, Any], sentence: str) -> None:
    assert read(chat_line(**body)) == Refused("a", sentence)


def test_without_a_template_conversations_are_refused() -> None:
    refused = read_line(chat_line(), model="tiny-mtp")
    assert isinstance(refused, Refused)
    assert refused.message == (
        "The tokenizer has no chat template; give one with --chat-template FILE, or ask /v1/completions."
    )


def test_results_have_the_form_of_a_conversation(read: Any) -> None:
    step = {5: Logprob(-2.0, 3, "é"), 1: Logprob(-0.5, 1, "b"), 2: Logprob(-1.0, 2, "c")}
    output = RequestOutput("0", "ab.", [0, 1, 2], [CompletionOutput(0, "é", [5], "length", logprobs=[step])])
    body = answered(read(chat_line(logprobs=True, top_logprobs=2)), output, "m")["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "é", "refusal": None}
    (content,) = choice["logprobs"]["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("é", -2.0, [0xC3, 0xA9])
    assert [entry["token"] for entry in content["top_logprobs"]] == ["b", "c"]
