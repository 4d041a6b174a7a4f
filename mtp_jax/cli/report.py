"""`mtp-jax report`: results of run-batch as one HTML page."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from mtp_jax.batch import storage
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError
from mtp_jax.report import page, read_results


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional(
        "results", nargs="+", metavar="RESULTS", help="JSONL that run-batch wrote; several make one page"
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="the page (default: beside the results, .html)")
    parser.add_argument(
        "--num-shown",
        type=int,
        default=20,
        metavar="N",
        help="answers shown, and slowest requests (default: %(default)s)",
    )


def run(options: Namespace) -> None:
    """Writes the page and prints where it is."""
    files = [file for pattern in options.results for file in storage.find(pattern)]
    if not files:
        raise ConfigError(f"{' '.join(options.results)} names no file.")
    if options.num_shown < 0:
        raise ConfigError(f"--num-shown is {options.num_shown}; it must be at least 0.")

    def lines() -> Iterator[bytes]:
        for file in files:
            with storage.told(file, "read"), storage.opened(file) as opened:
                yield from opened

    title = ", ".join(file.name for file in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    try:
        findings = read_results(lines(), num_shown=options.num_shown)
    except ValueError as error:
        raise ConfigError(f"{title}: {error}") from error
    output = Path(options.output) if options.output else Path(str(files[0])).with_suffix(".html")
    try:
        output.write_text(page(findings, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}.") from error
    print(output)
