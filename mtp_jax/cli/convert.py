"""`mtp-jax convert`: model folders from one format to the other."""

from argparse import Namespace

from mtp_jax.checkpoints import save_hf_model, save_orbax_model
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError

FORMATS = ("orbax", "hf")


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional("source", nargs="?", help="model folder to read; with --to hf also a bundled model's name")
    parser.add_positional("target", nargs="?", help="folder to write; it appears whole or not at all")
    parser.add_argument("--to", default="orbax", choices=FORMATS, help="format to write (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it exists")


def run(options: Namespace) -> None:
    """Reads, checks every tensor, writes; says on stdout where the result is."""
    if options.source is None or options.target is None:
        raise ConfigError("convert needs a folder to read and a folder to write; see mtp-jax convert --help.")
    save = save_orbax_model if options.to == "orbax" else save_hf_model
    save(options.source, options.target, overwrite=options.overwrite)
    print(options.target)
