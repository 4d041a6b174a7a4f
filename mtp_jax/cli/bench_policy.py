"""`mtp-jax bench policy`: a batch of unequal requests drained under every fixed draft length and under goodput."""

from argparse import Namespace
from pathlib import Path

from tqdm import tqdm

from mtp_jax.bench.drain import totals_of, unequal_lengths
from mtp_jax.bench.environment import chip, versions
from mtp_jax.bench.measure import Workload
from mtp_jax.bench.policy import bench_policy
from mtp_jax.bench.prompts import BUILT_IN, read_prompts, tokens_of
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
from mtp_jax.cli.start import check, engine_options, load, speculative_config, start, use_compile_cache
from mtp_jax.core.errors import ConfigError


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSONL with "prompt" or "turns" a line; by default a few built-in lines'
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds that are timed")
    parser.add_argument("--save", metavar="FILE", help="write step costs and acceptance there, for a simulated drain")
    add_speculation(parser, policies=())
    add_sampling(parser, ignore_eos=True)
    parser.set_defaults(max_tokens=512)  # that the longest request has to go when the batch is full
    add_model(parser)
    add_compile_cache(parser, default=False)


def run(options: Namespace) -> None:
    """Tables to stdout, one JSON line last."""
    _check_usage(options)
    use_compile_cache(options.compile_cache)
    speculative = speculative_config(options, policy="goodput")
    model = load(options)
    prompts = BUILT_IN if options.prompts is None else read_prompts(Path(options.prompts))
    totals = totals_of(unequal_lengths(options.requests, options.max_tokens))
    workload = Workload(
        tokens_of(prompts, model.tokenizer, options.requests), sampling_params(options), totals, fills_first=True
    )
    num_tokens = [len(prompt) + total for prompt, total in zip(workload.prompts, totals, strict=True)]
    settings = engine_options(
        options,
        model,
        num_slots=options.requests,
        num_tokens=max(num_tokens),
        longest_prompt=max(map(len, workload.prompts)),
    )
    for index, prompt in enumerate(workload.prompts):
        check(model, speculative, settings, prompt, workload.params_of(index))
    llm = start(model, speculative, settings, "compiling")
    facts = {
        "model": str(options.model),
        "method": options.method,
        "dtype": str(llm.dtype),
        "attention_backend": llm.engine.config.attention_backend,
        "versions": versions(),
        "requests": options.requests,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "repeats": options.repeats,
    }
    print("\n".join(f"{name}: {value}" for name, value in {**facts, "chip": chip()}.items()), end="\n\n")
    num_runs = (llm.engine.config.max_draft_len + 2) * (options.repeats + 1)
    with tqdm(total=num_runs, desc="draining", unit="run", disable=None, leave=False) as bar:
        bench = bench_policy(llm, workload, repeats=options.repeats, chip=chip(), facts=facts, on_run=bar.update)
    if options.save is not None:
        bench.recording.write(Path(options.save))
    print(bench.as_text(), end="\n\n")
    print(bench.json_line({**facts, "chip": chip()}))


def _check_usage(options: Namespace) -> None:
    if options.method == NO_METHOD:
        raise ConfigError("bench policy compares draft lengths; give --method a way to draft.")
    one_data_shard(options, "bench policy")
    for name, smallest in (("requests", 1), ("repeats", 1), ("max_tokens", 2)):
        value = getattr(options, name)
        if value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {smallest}.")
    if options.save is not None and not Path(options.save).absolute().parent.is_dir():
        raise ConfigError(f"--save {options.save} is in no folder that exists.")
