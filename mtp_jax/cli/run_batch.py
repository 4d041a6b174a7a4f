"""`mtp-jax run-batch`: a file of requests in OpenAI's batch format, one result line for each of its lines."""

import json
from argparse import Namespace
from pathlib import Path

from mtp_jax.batch import run_batch
from mtp_jax.batch.conversations import renderer
from mtp_jax.bench.tables import table
from mtp_jax.chat import load_template
from mtp_jax.cli.options import Parser, add_compile_cache, add_model, add_speculation
from mtp_jax.cli.start import gated_config, load, start, use_compile_cache
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM

POLICIES = ("goodput", "fixed", "schedule")


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--input", "-i", action="append", metavar="FILE", help="JSONL of requests; may be a glob, and given repeatedly"
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="JSONL of results; it appears when all are there")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.add_argument(
        "--max-num-seqs", type=int, default=8, metavar="N", help="requests decoded at once (default: %(default)s)"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template for /v1/chat/completions (default: the tokenizer's)"
    )
    add_speculation(parser, policies=POLICIES)
    add_model(parser)
    add_compile_cache(parser, default=True)


def run(options: Namespace) -> None:
    """A table of what was done to stdout, one JSON line last. Lines that fail do not make the command fail."""
    if not options.input or options.output is None:
        raise ConfigError("run-batch needs --input FILE and --output FILE.")
    output = Path(options.output)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output} is in no folder that exists.")
    use_compile_cache(options.compile_cache)
    speculative = gated_config(options)
    model = load(options)
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
        "mesh": options.mesh,
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
        resume=options.resume,
    )
    facts = {
        "lines": summary.num_lines,
        "answered": summary.num_answered,
        "refused": summary.num_refused,
        "failed": summary.num_failed,
        "from an earlier run": summary.num_resumed,
        "completion tokens": summary.num_completion_tokens,
        "tokens a step": round(summary.mean_acceptance_length, 3),
        "seconds": round(summary.seconds, 2),
        "tokens a second": round(summary.num_completion_tokens / summary.seconds, 1),
    }
    print(table([[name, str(value)] for name, value in facts.items()]))
    print(json.dumps({"run_batch": str(output), **{name.replace(" ", "_"): value for name, value in facts.items()}}))
