"""`mtp-jax bench decode`: every draft length, plain decoding and the goodput policy, timed on the same requests."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from mtp_jax.bench.compare import caveat
from mtp_jax.bench.decode import DecodeBench, bench_decode, json_line
from mtp_jax.bench.environment import chip, versions
from mtp_jax.bench.measure import Workload
from mtp_jax.bench.prompts import BUILT_IN, read_prompts, tokens_of
from mtp_jax.cli import suite
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
from mtp_jax.cli.start import Model, check, engine_options, load, speculative_config, start, use_compile_cache
from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM
from mtp_jax.options import speculative_from


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", action="extend", metavar="B", help="requests at once (default: 1)"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSONL with "prompt" or "turns" a line; by default a few built-in lines'
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds that are timed")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="FIELD=VALUE,...",
        help="another way to draft to time beside, as fields of SpeculativeConfig, such as "
        "method=dynamic_tree,num_speculative_tokens=3,tree_topk=2,tree_nodes=7; may be given several times",
    )
    add_speculation(parser, policies=())
    add_sampling(parser, ignore_eos=True)
    add_model(parser)
    add_compile_cache(parser, default=False)
    suite.add_options(parser)


def run(options: Namespace) -> None:
    """Tables to stdout, one JSON line last."""
    if options.suite is not None:
        suite.run(options, _defaults())
        return
    batch_sizes = options.batch_sizes or [1]
    _check_usage(options, batch_sizes)
    use_compile_cache(options.compile_cache)
    speculative = speculative_config(options, policy="goodput")
    others = {text: speculative_from(_fields_of(text)) for text in options.against}
    model = load(options)
    prompts = BUILT_IN if options.prompts is None else read_prompts(Path(options.prompts))
    results: list[DecodeBench] = []
    facts: dict[str, Any] = {}
    for batch_size in batch_sizes:
        workload = Workload(tokens_of(prompts, model.tokenizer, batch_size), sampling_params(options))
        drafting, plain = _engines(model, speculative, workload, options)
        if not facts:
            facts = _facts(options, drafting)
            print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
        against = {
            text: start(model, other, _settings(model, workload, options), f"compiling {text}")
            for text, other in others.items()
        }
        num_runs = (drafting.engine.config.max_draft_len + 3 + len(against)) * (options.repeats + 1)
        with tqdm(total=num_runs, desc="timing", unit="run", disable=None, leave=False) as bar:
            results.append(
                bench_decode(drafting, plain, workload, repeats=options.repeats, against=against, on_run=bar.update)
            )
        print(f"{results[-1].as_text()}\n", flush=True)
    print(json_line(results, facts))


def _defaults() -> Namespace:
    parser = Parser()
    add_options(parser)
    return parser.parse_args([])


def _check_usage(options: Namespace, batch_sizes: Sequence[int]) -> None:
    if options.method == NO_METHOD:
        raise ConfigError("bench decode always times plain decoding too; give --method a way to draft.")
    one_data_shard(options, "bench decode")
    for name in ("parts", "tiny", "save", "peer_python"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} goes with --suite.")
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}; it must be at least 1.")
    if min(batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes has {min(batch_sizes)}; each must be at least 1.")


def _engines(
    model: Model, speculative: SpeculativeConfig | None, workload: Workload, options: Namespace
) -> tuple[LLM, LLM]:
    settings = _settings(model, workload, options)
    for prompt in workload.prompts:
        check(model, speculative, settings, prompt, workload.params)
    drafting = start(model, speculative, settings, "compiling")
    return drafting, start(model, None, settings, "compiling plain decoding")


def _settings(model: Model, workload: Workload, options: Namespace) -> dict[str, Any]:
    longest = max(map(len, workload.prompts))
    return engine_options(
        options,
        model,
        num_slots=len(workload.prompts),
        num_tokens=longest + options.max_tokens,
        longest_prompt=longest,
    )


def _fields_of(text: str) -> dict[str, Any]:
    """Fields by name. `ConfigError` unless each part is a name, "=" and a YAML value."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if not separator or not name:
            raise ConfigError(f"--against {text}: {part!r} is not of the form FIELD=VALUE.")
        fields[name] = yaml.safe_load(value)
    return fields


def _facts(options: Namespace, llm: LLM) -> dict[str, Any]:
    """What was measured, and on what."""
    return {
        "model": str(options.model),
        "method": options.method,
        "acceptance": options.acceptance,
        "draft_sampling": llm.engine.config.speculative.draft_sampling,
        "equal_tokens": caveat(llm.engine.config.speculative, sampling_params(options)) or "promised",
        "dtype": str(llm.dtype),
        "attention_backend": llm.engine.config.attention_backend,
        "chip": chip(),
        "versions": versions(),
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "repeats": options.repeats,
    }
