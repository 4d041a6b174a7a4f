"""`mtp-jax bench batch`: a file of requests by one process and by several, as ratios."""

import json
import tempfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from mtp_jax.bench.batch import Job, JobSpeed, as_text, request_lines, results_in, tokens_in
from mtp_jax.bench.environment import versions
from mtp_jax.bench.prompts import BUILT_IN, read_prompts, tokens_of
from mtp_jax.cli import run_batch
from mtp_jax.cli.options import Parser, add_compile_cache, add_model, add_speculation
from mtp_jax.cli.start import gated_config, load
from mtp_jax.core.errors import ConfigError


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add(
        "--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of processes (default: 1 2 4)"
    )
    add("--requests", type=int, default=400, metavar="N", help="requests of a job (default: %(default)s)")
    add("--prompts", metavar="FILE", help='JSONL with "prompt" or "turns" a line; by default a few built-in lines')
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens of each (default: %(default)s)")
    add("--gpus", type=int, metavar="N", help="GPUs of this machine, given to the processes in turns, one each")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="requests a process decodes at once")
    add_speculation(parser, policies=run_batch.POLICIES)
    add_model(parser)
    add_compile_cache(parser, default=True)


def run(options: Namespace) -> None:
    """A table to stdout, one JSON line last."""
    _check_usage(options)
    gated_config(options)
    model = load(options)  # here for its tokenizer alone
    prompts = BUILT_IN if options.prompts is None else read_prompts(Path(options.prompts))
    lines = request_lines(tokens_of(prompts, model.tokenizer, options.requests), max_tokens=options.max_tokens)
    del model
    speeds: list[JobSpeed] = []
    texts: list[list[tuple[int, ...]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder / "requests.jsonl", folder / "options.json", options.gpus)
        job.requests.write_bytes(lines)
        job.options.write_text(json.dumps(_options_of_jobs(options)))
        for num_processes in tqdm(options.processes, desc="jobs", unit="job", disable=None, leave=False):
            speeds.append(job.run(folder / str(num_processes), num_processes))
            texts.append(tokens_in(results_in(folder / str(num_processes))))
    num_equal = [sum(a == b for a, b in zip(text, texts[0], strict=True)) for text in texts]
    facts = {
        "model": str(options.model),
        "method": options.method,
        "requests": options.requests,
        "versions": versions(),
    }
    print(as_text(speeds), end="\n\n")
    print(f"Requests with the tokens of the first job: {', '.join(map(str, num_equal))} of {options.requests}.")
    jobs = [{**asdict(one), "tokens_per_s": one.tokens_per_s} for one in speeds]
    print(json.dumps({"bench": "batch", **facts, "jobs": jobs, "equal": num_equal}))


def _options_of_jobs(options: Namespace) -> dict[str, object]:
    """What this command was given of the options of `run-batch`."""
    parser = Parser()
    run_batch.add_options(parser)
    known = vars(parser.parse_args([]))
    return {name: value for name, value in vars(options).items() if name in known}


def _check_usage(options: Namespace) -> None:
    wrong = [count for count in options.processes if count < 1]
    if wrong or len(set(options.processes)) < len(options.processes):
        raise ConfigError(f"--processes are {options.processes}; each must be at least 1, and stand there once.")
    if options.mesh is not None:
        raise ConfigError("bench batch runs an engine for each process; see bench mesh for engines that span devices.")
    for name in ("requests", "max_tokens", "gpus"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
