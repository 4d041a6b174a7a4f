"""`mtp-jax generate`: writes on from a prompt, and compares the speed with plain decoding's."""

import sys
import time
from argparse import Namespace
from dataclasses import replace

from tqdm import tqdm

from mtp_jax.bench.compare import compare
from mtp_jax.bench.measure import Workload
from mtp_jax.bench.recording import Acceptance, recorded
from mtp_jax.bench.tables import shares, step_counts, table
from mtp_jax.cli.options import (
    NO_METHOD,
    Parser,
    add_compile_cache,
    add_model,
    add_sampling,
    add_speculation,
    one_data_shard,
    sampling_params,
)
from mtp_jax.cli.start import Model, check, engine_options, gated_config, load, start, use_compile_cache
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM
from mtp_jax.outputs import CompletionOutput, RequestOutput
from mtp_jax.text import encode


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional("prompt", nargs="?", help="the text to go on from")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="then time this against plain decoding, in turns, and say whether the tokens are equal",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="then list each token's log-probability and rank, and the N likeliest tokens in its place",
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds that --compare times")
    add_speculation(parser, policies=("goodput", "fixed", "schedule"))
    add_sampling(parser, ignore_eos=False)
    add_model(parser)
    add_compile_cache(parser, default=True)


def run(options: Namespace) -> None:
    """Text to stdout as it comes, then the comparison; everything else to stderr."""
    _check_usage(options)
    use_compile_cache(options.compile_cache)
    params = replace(sampling_params(options), logprobs=options.logprobs)
    speculative = gated_config(options)
    model = load(options)
    prompt = _tokens_of(options.prompt, model)
    settings = engine_options(
        options, model, num_slots=1, num_tokens=len(prompt) + options.max_tokens, longest_prompt=len(prompt)
    )
    check(model, speculative, settings, prompt, params)

    llm = start(model, speculative, settings, "compiling")
    began = time.perf_counter()
    output, acceptance = _write(llm, options.prompt, prompt, params)
    if options.logprobs is not None:
        print(f"\n{_listed(output.outputs[0], options.logprobs)}")
    if not options.compare:
        print(_summary(output, acceptance, time.perf_counter() - began), file=sys.stderr)
        return
    plain = start(model, None, settings, "compiling plain decoding")
    with tqdm(total=2 * (options.repeats + 1), desc="timing", unit="run", disable=None, leave=False) as bar:
        comparison = compare(llm, plain, Workload((prompt,), params), repeats=options.repeats, on_run=bar.update)
    print(f"\n{comparison.as_text(model.tokenizer)}")


def _check_usage(options: Namespace) -> None:
    if options.prompt is None:
        raise ConfigError("generate needs a prompt to go on from; see mtp-jax generate --help.")
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}; it must be at least 1.")
    if options.compare:
        one_data_shard(options, "--compare")
    if options.compare and options.method == NO_METHOD:
        raise ConfigError("--compare times drafting against plain decoding, and --method none does not draft.")


def _tokens_of(prompt: str, model: Model) -> tuple[int, ...]:
    if model.tokenizer is None:
        raise ConfigError("This model has no tokenizer, and the prompt is text; use LLM.generate with token ids.")
    return tuple(encode(model.tokenizer, prompt))


def _write(llm: LLM, text: str, prompt: tuple[int, ...], params: SamplingParams) -> tuple[RequestOutput, Acceptance]:
    """Prints the prompt to stderr and the new text to stdout, so that a terminal shows both and a pipe the new text."""
    print(text, end="", file=sys.stderr, flush=True)
    with recorded(llm.engine.group.shards) as steps:
        deltas = llm.stream(prompt, params)
        while True:
            try:
                delta = next(deltas)
            except StopIteration as end:
                print(flush=True)
                return end.value, Acceptance.of(steps)
            print(delta, end="", flush=True)


def _listed(completion: CompletionOutput, num_likeliest: int) -> str:
    """A line for each token: its text, log-probability and rank, then the likeliest tokens with theirs."""
    rows = [["token", "logprob", "rank", "likeliest"]]
    for token, listed in zip(completion.token_ids, completion.logprobs or (), strict=True):
        own = listed[token]
        likeliest = [f"{e.decoded_token!r} {e.logprob:.3f}" for e in listed.values() if e.rank <= num_likeliest]
        rows.append([repr(own.decoded_token), f"{own.logprob:.3f}", str(own.rank), "  ".join(likeliest) or "-"])
    return table(rows)


def _summary(output: RequestOutput, acceptance: Acceptance, seconds: float) -> str:
    num_tokens = len(output.outputs[0].token_ids)
    facts = ["lossy: this is not the model's own text"] if output.outputs[0].is_lossy else []
    facts.append(f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")
    if acceptance.draft_lens:
        facts += [
            f"{output.metrics.mean_acceptance_length:.2f} tokens a step",
            f"draft lengths used:       {step_counts(acceptance.draft_lens)}",
        ]
    if acceptance.drafted:
        facts += [
            f"drafts kept, by position: {shares(acceptance.unconditional)}",
            f"where all before were:    {shares(acceptance.conditional)}",
        ]
    return "\n" + "\n".join(facts)
