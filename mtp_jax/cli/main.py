"""Finds the command, reads its options, and turns what went wrong into an exit code.

0: done. 2: usage or configuration error, one sentence on stderr. 1: an internal fault, with its traceback.
"""

import logging
import sys
import warnings
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from mtp_jax.bench.environment import version_of
from mtp_jax.cli.options import Parser, add_common, as_yaml, read_options
from mtp_jax.core.errors import ConfigError


class Command(Protocol):
    """What the module of a command provides."""

    def add_options(self, parser: Parser) -> None:
        """Declares the command's own options."""
        ...

    def run(self, options: Namespace) -> None:
        """Does it. Raises `ConfigError` for what the user can put right."""
        ...


COMMANDS = {
    "generate": (
        "mtp_jax.cli.generate",
        "write on from a prompt; --compare also times plain decoding",
    ),
    "run-batch": ("mtp_jax.cli.run_batch", "a file of requests, one result line for each; goes on after a kill"),
    "report": (
        "mtp_jax.cli.report",
        "results of run-batch as one HTML page: how tokens came, acceptance, draft length",
    ),
    "bench decode": ("mtp_jax.cli.bench_decode", "speed of every draft length against plain decoding"),
    "bench attention": ("mtp_jax.cli.bench_attention", "the attention kernels of a Hopper GPU, checked and timed"),
    "bench batch": ("mtp_jax.cli.bench_batch", "a file of requests by one process and by several, as ratios"),
    "bench acceptance": (
        "mtp_jax.cli.bench_acceptance",
        "how often drafts stand, by the way they are drawn, against the exact share",
    ),
    "bench mesh": ("mtp_jax.cli.bench_mesh", "a mesh's tokens and speed against one device's, and what the vote costs"),
    "bench policy": ("mtp_jax.cli.bench_policy", "a batch that drains, under every fixed draft length and goodput"),
    "plan": ("mtp_jax.cli.plan", "a model on accelerators that are not here: memory, least time of a step, drafts"),
    "eval-heads": ("mtp_jax.cli.eval_heads", "how often the target would accept its MTP drafts on a text, by depth"),
    "rank-tokens": ("mtp_jax.cli.rank_tokens", "a model's tokens by how frequent they are, for --draft-vocab-size"),
    "train": ("mtp_jax.cli.train", "a model and its MTP layers, or its MTP layers alone, on your own texts"),
    "pull": ("mtp_jax.cli.pull", "a model that does not come with the project, fetched and converted"),
    "convert": ("mtp_jax.cli.convert", "a model folder or .gguf file to Orbax or Hugging Face layout"),
    "doctor": ("mtp_jax.cli.doctor", "what this machine has, what works on it, and advice where something is amiss"),
}
"""Name on the command line: (module, help). A module is imported when its command is called, and not before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code. `arguments` without the program's name, from `sys.argv` by default."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(list(sys.argv[1:] if arguments is None else arguments))
    except (ConfigError, NotImplementedError) as error:
        print(f"mtp-jax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mtp-jax: interrupted.", file=sys.stderr)
        return 130
    return 0


def command_of(name: str) -> tuple[Command, Parser]:
    """A command and all of its options: "bench decode", say.

    >>> command_of("doctor")[1].prog
    'mtp-jax doctor'
    """
    module, description = COMMANDS[name]
    command = cast(Command, import_module(module))
    parser = Parser(prog=f"mtp-jax {name}", description=f"{description[0].upper()}{description[1:]}.")
    command.add_options(parser)
    add_common(parser)
    return command, parser


def _run(arguments: list[str]) -> None:
    name = next((name for name in COMMANDS if arguments[: len(name.split())] == name.split()), None)
    if name is None:
        _top_parser().parse_args(arguments)
        raise ConfigError("a command is missing; see mtp-jax --help.")
    command, parser = command_of(name)
    options = read_options(parser, arguments[len(name.split()) :])
    if options.print_config:
        print(as_yaml(parser, options), end="")
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO if options.verbose else logging.WARNING)
    command.run(options)


def _top_parser() -> Parser:
    listing = "\n".join(f"  {name:<16} {description}" for name, (_, description) in COMMANDS.items())
    parser = Parser(
        prog="mtp-jax",
        usage="mtp-jax COMMAND [options]",
        description=f"commands:\n{listing}\n\nmtp-jax COMMAND --help lists its options.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    parser.add_argument("--version", action="version", version=version_of("mtp-jax"))
    return parser


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"mtp-jax: warning: {message}", file=sys.stderr)
