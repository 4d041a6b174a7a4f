"""`mtp-jax run-batch`: a file of requests in OpenAI's batch format, one result line for each of its lines."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from mtp_jax.batch import Summary, run_batch, storage
from mtp_jax.batch.conversations import renderer
from mtp_jax.batch.prometheus import Endpoint
from mtp_jax.batch.team import ALONE, Team, describe
from mtp_jax.batch.watching import Bar, EventLog, Watcher
from mtp_jax.bench.tables import table
from mtp_jax.chat import load_template
from mtp_jax.cli.options import Parser, add_compile_cache, add_model, add_speculation
from mtp_jax.cli.processes import add_processes, team_and_mesh
from mtp_jax.cli.start import gated_config, load, start, use_compile_cache
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM

POLICIES = ("goodput", "fixed", "schedule")


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    add = parser.add_argument_group("files (local, gs:// or s3://)").add_argument
    add("--input", "-i", action="append", metavar="FILE", help="JSONL of requests; may be a glob, and given repeatedly")
    add("--output", "-o", metavar="FILE", help="JSONL of results; it appears when all are there")
    add("--resume", action="store_true", help="go on with a run that was stopped")
    add("--no-merge", action="store_true", help="leave a file of results for each process: OUTPUT-00000-of-00004.jsonl")
    add("--chat-template", metavar="FILE", help="Jinja template for /v1/chat/completions (default: the tokenizer's)")
    add(
        "--token-origins",
        action="store_true",
        help="results also say how each token came, and when: for mtp-jax report (a line is several times as long)",
    )
    watch = parser.add_argument_group("watching").add_argument
    watch(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics here, under vLLM's names; the second process of a host (Slurm, MPI) one further",
    )
    watch("--event-log", metavar="FILE", help="JSONL of what happens; of several processes one file each")
    parser.add_argument(
        "--max-num-seqs", type=int, default=8, metavar="N", help="requests decoded at once (default: %(default)s)"
    )
    add_processes(parser)
    add_speculation(parser, policies=POLICIES)
    add_model(parser)
    add_compile_cache(parser, default=True)


def run(options: Namespace) -> None:
    """A table of what was done to stdout, one JSON line last. Lines that fail do not make the command fail."""
    if not options.input or options.output is None:
        raise ConfigError("run-batch needs --input FILE and --output FILE.")
    output = storage.path_of(options.output)
    if not storage.is_object_store(output) and not Path(output).absolute().parent.is_dir():
        raise ConfigError(f"--output {output} is in no folder that exists.")
    use_compile_cache(options.compile_cache)
    team, mesh = team_and_mesh(options)
    speculative = gated_config(options)
    model = load(Namespace(**{**vars(options), "mesh": mesh}))
    template_file = None if options.chat_template is None else Path(options.chat_template)
    template = load_template(model.folder, template_file)
    if template_file is not None and model.tokenizer is None:
        raise ConfigError(f"--chat-template {template_file} needs a tokenizer and {options.model} has none.")
    settings = {
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "block_size": options.block_size,
        "num_kv_blocks": options.num_kv_blocks,
        "attention_backend": options.attention_backend,
        "moe_backend": options.moe_backend,
        "linear_backend": options.linear_backend,
        "mesh": mesh,
    }

    def make_llm() -> LLM:
        return start(model, speculative, settings, "compiling")

    job = {
        "dtype": str(model.dtype),
        "max_model_len": options.max_model_len,
        "acceptance": "match" if speculative is None else speculative.acceptance,
        "chat_template": None if template is None else template.digest,
    }
    summary = run_batch(
        make_llm,
        options.input,
        output,
        model=str(options.model),
        job=job,
        render=renderer(template, model.tokenizer),
        team=team,
        resume=options.resume,
        merged=not options.no_merge,
        wants_origins=options.token_origins,
        watchers=_watchers(options, team),
    )
    _print(summary, str(output))


def _watchers(options: Namespace, team: Team) -> list[Watcher]:
    watchers: list[Watcher] = [Bar()]
    if options.metrics_port is not None:
        watchers.append(Endpoint(options.metrics_port + team.on_host, str(options.model), team.process))
    if options.event_log is not None:
        file = Path(options.event_log)
        if team is not ALONE:
            file = file.with_name(f"{file.stem}-{team.process:05d}-of-{team.num_processes:05d}{file.suffix}")
        watchers.append(EventLog(file, describe(team)))
    return watchers


def _print(summary: Summary, output: str) -> None:
    facts: dict[str, Any] = {
        "lines": summary.num_lines,
        "answered": summary.num_answered,
        "refused": summary.num_refused,
        "failed": summary.num_failed,
        "from an earlier run": summary.num_resumed,
        "completion tokens": summary.num_completion_tokens,
        "tokens a step": round(summary.mean_acceptance_length, 3),
        "seconds": round(summary.seconds, 2),
        "tokens a second": round(summary.num_completion_tokens / max(summary.seconds, 1e-9), 1),
        "results in place": summary.is_complete,
    }
    print(table([[name, str(value)] for name, value in facts.items()]))
    print(json.dumps({"run_batch": output, **{name.replace(" ", "_"): value for name, value in facts.items()}}))
