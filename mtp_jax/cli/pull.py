"""`mtp-jax pull`: fetches a model that does not come with the project."""

from argparse import Namespace

from mtp_jax.checkpoints.catalogue import PULLABLE
from mtp_jax.checkpoints.pull import pull
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional("name", nargs="?", help=f"one of {', '.join(PULLABLE)}")
    parser.add_argument("--without-head", action="store_true", help="leave out the MTP layers, to train new ones")
    parser.add_argument("--overwrite", action="store_true", help="fetch it again where it is here already")


def run(options: Namespace) -> None:
    """Prints the folder. The model's name is what `--model` takes from then on."""
    if options.name is None:
        raise ConfigError(f"pull needs the name of a model, one of {', '.join(PULLABLE)}.")
    print(pull(options.name, with_head=not options.without_head, overwrite=options.overwrite))
