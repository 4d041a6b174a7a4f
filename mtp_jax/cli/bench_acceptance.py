"""`mtp-jax bench acceptance`: how often drafts stand, by the way they are drawn, against the exact expectation."""

from argparse import Namespace
from pathlib import Path

from tqdm import tqdm

from mtp_jax.bench.acceptance import WAYS, Measured, as_text, json_line, measure
from mtp_jax.bench.environment import chip, versions
from mtp_jax.bench.prompts import BUILT_IN, read_prompts, tokens_of
from mtp_jax.cli.options import Parser, add_compile_cache, add_model, one_data_shard
from mtp_jax.cli.start import check, engine_options, load, start, use_compile_cache
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--temperatures", type=float, nargs="+", action="extend", metavar="T", help="(default: 0, 0.6 and 1)"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSONL with "prompt" or "turns" a line; by default a few built-in lines'
    )
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="requests at once (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens of each (default: %(default)s)"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K", help="longest draft")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same figures")
    add_model(parser)
    add_compile_cache(parser, default=False)


def run(options: Namespace) -> None:
    """A table to stdout, one JSON line last."""
    if options.requests < 1:
        raise ConfigError(f"--requests is {options.requests}; it must be at least 1.")
    one_data_shard(options, "bench acceptance")
    use_compile_cache(options.compile_cache)
    model = load(options)
    temperatures = options.temperatures or [0.0, 0.6, 1.0]
    prompts = BUILT_IN if options.prompts is None else read_prompts(Path(options.prompts))
    tokens = tokens_of(prompts, model.tokenizer, options.requests)
    longest = max(map(len, tokens))
    settings = engine_options(
        options,
        model,
        num_slots=len(tokens),
        num_tokens=longest + options.max_tokens,
        longest_prompt=longest,
    )
    every = [
        SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=options.seed, ignore_eos=True)
        for temperature in temperatures
    ]
    results: list[Measured] = []
    with tqdm(total=len(WAYS) * len(every), desc="measuring", unit="run", disable=None, leave=False) as bar:
        for way in WAYS:
            speculative = SpeculativeConfig(num_speculative_tokens=options.num_speculative_tokens, **way.speculative)
            for params in every:
                check(model, speculative, settings, tokens[0], params)
            llm = start(model, speculative, settings, f"compiling {way.name}")
            for params in every:
                results.append(measure(llm, way, model.weights, tokens, params))
                bar.update()
    facts = {
        "model": str(options.model),
        "dtype": str(llm.dtype),
        "chip": chip(),
        "versions": versions(),
        "num_speculative_tokens": llm.engine.config.max_draft_len,
        "requests": len(tokens),
        "max_tokens": options.max_tokens,
        "seed": options.seed,
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    print(as_text(results), end="\n\n")
    print(json_line(results, facts))
