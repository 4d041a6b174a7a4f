"""What a line asks for, and one sentence for each way of asking for nothing that can be done."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.batch.lines import Asked, Refused, read_line, seed_of
from mtp_jax.batch.results import refused


def line(body: Any = None, **fields: Any) -> bytes:
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"} | (body or {})}
    return json.dumps(asked | fields).encode()


def test_parameters_have_their_openai_names() -> None:
    asked = read_line(line({"max_tokens": 3, "temperature": 0.5, "stop": ["."], "seed": 4, "user": "me"}), model="m")
    assert isinstance(asked, Asked)
    params = asked.params
    assert (asked.custom_id, asked.prompt) == ("a", "x")
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (3, 0.5, ["."], 4)


def test_a_null_is_a_default_and_token_biases_have_integer_keys() -> None:
    asked = read_line(line({"logprobs": None, "logit_bias": {"7": -1.5}}), model="m")
    assert isinstance(asked, Asked)
    assert asked.params.logprobs is None
    assert asked.params.logit_bias == {7: -1.5}


def test_a_line_without_a_seed_draws_by_its_own_bytes() -> None:
    first, again, other = (read_line(line({"temperature": t}), model="m") for t in (0.5, 0.5, 0.6))
    assert isinstance(first, Asked)
    assert isinstance(again, Asked)
    assert isinstance(other, Asked)
    assert first.params.seed == again.params.seed != other.params.seed
    assert seed_of(b"x", 0) == seed_of(b"x\r\n", 0) != seed_of(b"x", 1)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "The line is not JSON: Expecting value at column 1."),
        (b"\xff{}", "The line is not UTF-8: byte 0 does not fit."),
        (b"[" * 100_000, "The line cannot be read as JSON: RecursionError."),
        (b"[1]", "The line holds a list; it must be a JSON object."),
        (b"{}", "custom_id is None; it must be a string."),
        (line(custom_id=7), "custom_id is 7; it must be a string."),
        (
            line(url="/v1/embeddings"),
            "url is '/v1/embeddings'; it must be '/v1/completions' or '/v1/chat/completions'.",
        ),
        (line(method="GET"), "method is 'GET'; it must be 'POST'."),
        (line(body=None, priority=1), "The line has the field 'priority'; it takes custom_id, method, url and body."),
        (json.dumps({"custom_id": "a", "url": "/v1/completions"}).encode(), "body is None; it must be a JSON object."),
        (json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {}}).encode(), "body has no prompt."),
        (line({"model": "gpt"}), "model is 'gpt'; this run serves 'm'."),
        (line({"tools": []}), "body has 'tools', which /v1/completions does not take here."),
        (line({"stream": True}), "stream is True, which a batch does not take; leave it out."),
        (line({"prompt_logprobs": 1}), "prompt_logprobs is 1, which a batch does not take; leave it out."),
        (line({"logit_bias": {"x": 1}}), "logit_bias is {'x': 1}; its keys must be token ids."),
        (line({"logit_bias": [1]}), "logit_bias is [1]; it must map token ids to numbers."),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(raw: bytes, sentence: str) -> None:
    read = read_line(raw, model="m")
    assert isinstance(read, Refused)
    assert read.message == sentence
    result = refused(read)
    assert result["response"]["status_code"] == 400
    assert result["error"] == {"code": "invalid_request", "message": sentence}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
odd_bodies = st.dictionaries(
    st.sampled_from(("prompt", "max_tokens", "temperature", "stop", "logit_bias", "seed", "n", "model", "stream", "x")),
    json_values,
)


@given(raw=st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_are_too_odd(raw: bytes) -> None:
    assert isinstance(read_line(raw, model="m"), Asked | Refused)


@given(body=odd_bodies)
def test_no_body_is_too_odd(body: dict[str, Any]) -> None:
    read = read_line(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}).encode(), model="m")
    assert isinstance(read, Asked | Refused)
    json.dumps(refused(read)) if isinstance(read, Refused) else None


def test_a_line_may_ask_for_its_prompts_tokens() -> None:
    body = '{"prompt": "x", "return_token_ids": %s}'
    line = '{"custom_id": "a", "url": "/v1/completions", "body": ' + body + "}"
    read = [read_line((line % value).encode(), model="m") for value in ("true", "false", "null", "1")]
    assert [one.returns_token_ids for one in read[:3] if isinstance(one, Asked)] == [True, False, False]
    assert read[3] == Refused("a", "return_token_ids is 1; it must be true or false.")
