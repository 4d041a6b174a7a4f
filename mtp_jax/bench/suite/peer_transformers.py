"""Hugging Face transformers on the same model, in a process of its own: `python -m` this, with the model on stdin.

Reads one JSON object: `config` (Hugging Face form; random weights) or `folder`, `batch_sizes`, `context`, `tokens`,
`device`, `ways`, `threads`. Writes one JSON line as each figure is there, so that one which takes too long costs no
other. Imports nothing of this project: it may run under another interpreter, where torch is.

Ways: "eager" (`generate`), "static" (`generate` with a static cache, which transformers compiles), "graphs" (a greedy
loop of our own over `torch.compile(mode="reduce-overhead")` and a static cache).
"""

# pyright: reportMissingImports=false
# torch and transformers are no dependencies.

import json
import statistics
import sys
import time
from typing import Any

_REPEATS = 2


def main() -> None:
    """Measures what stdin asks for."""
    import torch
    import transformers

    task = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    say(way="versions", torch=torch.__version__, transformers=transformers.__version__)
    model = load(task)
    ways = {"eager": eager, "static": static, "graphs": graphs}
    for way in task["ways"]:
        for batch_size in task["batch_sizes"]:
            try:
                figures = ways[way](model, task, batch_size)
            except Exception as error:  # one way may fail where another does not, and the figures are worth having
                figures = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            say(way=way, batch_size=batch_size, **figures)


def say(**figures: Any) -> None:
    """One line of JSON."""
    print(json.dumps(figures), flush=True)


def load(task: dict[str, Any]) -> Any:
    """The model, on its device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device(task["device"])
    if task.get("folder"):
        return AutoModelForCausalLM.from_pretrained(task["folder"], dtype=torch.float32).to(device).eval()
    config = AutoConfig.for_model(**{**task["config"], "num_nextn_predict_layers": 0})
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def prompts(model: Any, task: dict[str, Any], batch_size: int) -> Any:
    """Random tokens."""
    import torch

    torch.manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (batch_size, task["context"]), device=model.device)


def done(model: Any) -> float:
    """The time, once the device has nothing left to do."""
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def eager(model: Any, task: dict[str, Any], batch_size: int, **more: Any) -> dict[str, float]:
    """Tokens a second of `generate` after the prompt: a long run less a short one."""
    import torch

    ids = prompts(model, task, batch_size)

    def run(num_tokens: int) -> float:
        start = done(model)
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                pad_token_id=0,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                **more,
            )
        return done(model) - start

    short, long = max(task["tokens"] // 4, 1), task["tokens"]
    start = time.perf_counter()
    run(short)
    warm_up_s = time.perf_counter() - start
    seconds = [run(long) - run(short) for _ in range(_REPEATS)]
    per_token = statistics.median(seconds) / (long - short)
    return {"ms_per_step": 1000 * per_token, "tokens_per_s": batch_size / per_token, "warm_up_s": warm_up_s}


def static(model: Any, task: dict[str, Any], batch_size: int) -> dict[str, float]:
    """The same with a static cache. Its size follows the number of tokens, so both runs compile once, in a run each."""
    import torch

    ids = prompts(model, task, batch_size)
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "pad_token_id": 0,
        "min_new_tokens": task["tokens"],
        "max_new_tokens": task["tokens"],
        "cache_implementation": "static",
    }
    times: list[float] = []
    for _ in range(2 + _REPEATS):
        start = done(model)
        with torch.no_grad():
            model.generate(ids, **settings)
        times.append(done(model) - start)
    per_token = statistics.median(times[2:]) / task["tokens"]  # its one prefill included
    return {"ms_per_step": 1000 * per_token, "tokens_per_s": batch_size / per_token, "warm_up_s": sum(times[:2])}


def graphs(model: Any, task: dict[str, Any], batch_size: int) -> dict[str, float]:
    """A greedy loop over the compiled forward of one token: the fastest that transformers was got to run."""
    import torch
    from transformers import StaticCache

    num_warm = 4
    context = task["context"]
    ids = prompts(model, task, batch_size)
    cache = StaticCache(config=model.config, max_cache_len=context + task["tokens"] + num_warm + 1)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        token = torch.ones((batch_size, 1), dtype=torch.long, device=model.device)

        def step(position: int, token: Any) -> Any:
            positions = torch.full((batch_size, 1), position, device=model.device)
            place = torch.tensor([position], device=model.device)
            logits = forward(token, past_key_values=cache, position_ids=positions, cache_position=place).logits
            return logits[:, -1:].argmax(-1).clone()

        start = time.perf_counter()
        for index in range(num_warm):
            token = step(context + index, token)
        warm_up_s = done(model) - start
        start = done(model)
        for index in range(num_warm, num_warm + task["tokens"]):
            token = step(context + index, token)
        per_token = (done(model) - start) / task["tokens"]
    return {"ms_per_step": 1000 * per_token, "tokens_per_s": batch_size / per_token, "warm_up_s": warm_up_s}


if __name__ == "__main__":
    main()
