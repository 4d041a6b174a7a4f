"""Result lines: OpenAI's batch output, with what speculation did for each request beside the usage."""

import hashlib
from typing import Any

from tokenizers import Tokenizer

from mtp_jax.batch.bodies import CHAT_URL
from mtp_jax.batch.lines import Asked, Refused
from mtp_jax.batch.origins import origins_of
from mtp_jax.outputs import CompletionOutput, Logprob, RequestOutput

BAD_REQUEST, INTERNAL_ERROR = 400, 500
_LONGEST_MESSAGE = 500


def refused(line: Refused) -> dict[str, Any]:
    """The result of a line that asks for nothing that can be done."""
    return _error(line.custom_id, BAD_REQUEST, "invalid_request", line.message)


def failed(asked: Asked, message: str) -> dict[str, Any]:
    """The result of a request that the device could not run."""
    return _error(asked.custom_id, INTERNAL_ERROR, "internal_error", message)


def answered(asked: Asked, output: RequestOutput, model: str, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The result of a request that ran, or was rejected by the engine. `tokenizer` writes out tokens of traced ones."""
    rejected = next((one.error for one in output.outputs if one.finish_reason == "rejected"), None)
    if rejected is not None:
        return _error(asked.custom_id, BAD_REQUEST, "invalid_request", rejected)
    num_completion = sum(len(one.token_ids) for one in output.outputs)
    is_chat = asked.url == CHAT_URL
    num_listed = asked.params.logprobs or 0
    body: dict[str, Any] = {
        "id": _id_of("chatcmpl" if is_chat else "cmpl", asked.custom_id),
        "object": "chat.completion" if is_chat else "text_completion",
        "model": model,
        "choices": [_chat_choice(one, num_listed) if is_chat else _choice(one) for one in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": num_completion,
            "total_tokens": len(output.prompt_token_ids) + num_completion,
        },
        "metrics": {
            "num_steps": output.metrics.num_steps,
            "num_draft_tokens": output.metrics.num_draft_tokens,
            "num_accepted_tokens": output.metrics.num_accepted_tokens,
            "accepted_per_pos": output.metrics.accepted_per_pos,
            "drafted_per_pos": output.metrics.drafted_per_pos,
            "mean_acceptance_length": output.metrics.mean_acceptance_length,
        },
    }
    if asked.returns_token_ids:
        for choice in body["choices"]:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
    for choice, one in zip(body["choices"], output.outputs, strict=True):
        choice.update(origins_of(one, tokenizer))
    if output.prompt_logprobs is not None:
        body["choices"][0]["prompt_logprobs"] = [
            listed and {str(token): entry.logprob for token, entry in listed.items()}
            for listed in output.prompt_logprobs
        ]
    return _line(asked.custom_id, {"status_code": 200, "request_id": body["id"], "body": body}, None)


def _choice(one: CompletionOutput) -> dict[str, Any]:
    choice = {"index": one.index, "text": one.text, **_ending(one), "logprobs": None}
    if one.logprobs is not None:
        steps = list(zip(one.token_ids, one.logprobs, strict=True))
        choice["logprobs"] = {
            "tokens": [step[token].decoded_token for token, step in steps],
            "token_logprobs": [step[token].logprob for token, step in steps],
            "top_logprobs": [{str(token): entry.logprob for token, entry in step.items()} for _, step in steps],
        }
    return choice


def _chat_choice(one: CompletionOutput, num_listed: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": one.text, "refusal": None}
    choice = {"index": one.index, "message": message, **_ending(one), "logprobs": None}
    if one.logprobs is not None:
        content = []
        for token, step in zip(one.token_ids, one.logprobs, strict=True):
            likeliest = sorted(step.values(), key=lambda entry: entry.rank)
            top = [_chat_logprob(entry) for entry in likeliest if entry.rank <= num_listed]
            content.append({**_chat_logprob(step[token]), "top_logprobs": top})
        choice["logprobs"] = {"content": content, "refusal": None}
    return choice


def _chat_logprob(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": entry.logprob, "bytes": None if text is None else [*text.encode()]}


def _ending(one: CompletionOutput) -> dict[str, Any]:
    """What both forms say of a sample beside its text."""
    ending = {"token_ids": one.token_ids, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
    return {**ending, "is_lossy": True} if one.is_lossy else ending


def _error(custom_id: str | None, status: int, code: str, message: str) -> dict[str, Any]:
    if len(message) > _LONGEST_MESSAGE:  # it may quote what stands in the line
        message = f"{message[: _LONGEST_MESSAGE - 3]}..."
    body = {"error": {"message": message, "type": code, "code": status}}
    return _line(custom_id, {"status_code": status, "body": body}, {"code": code, "message": message})


def _line(custom_id: str | None, response: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": _id_of("batch_req", custom_id), "custom_id": custom_id, "response": response, "error": error}


def _id_of(prefix: str, custom_id: str | None) -> str:
    """An id that is the same in every run: a line's result does not depend on when it was made."""
    named = "" if custom_id is None else custom_id
    return f"{prefix}-{hashlib.sha256(named.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"
