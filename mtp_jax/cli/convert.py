"""`mtp-jax convert`: model folders from one format to the other, and whether one is whole."""

import json
from argparse import Namespace

from mtp_jax.checkpoints import save_hf_model, save_orbax_model
from mtp_jax.checkpoints.check import check_model
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError

FORMATS = ("orbax", "hf")


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional(
        "source", nargs="?", help="model folder or .gguf file; with --to hf also a bundled model's name"
    )
    parser.add_positional("target", nargs="?", help="folder to write; it appears whole or not at all")
    parser.add_argument("--to", default="orbax", choices=FORMATS, help="format to write (default: %(default)s)")
    parser.add_argument("--head", metavar="FOLDER", help="with --to hf: MTP layers to lay over a model that has none")
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing: compare the source's config with its tensors, as far as they are here (names from the "
        "index, shapes from the files' headers)",
    )


def run(options: Namespace) -> None:
    """Reads, checks every tensor, writes; says on stdout where the result is. `--check`: a line and a JSON line."""
    if options.check:
        _check(options)
        return
    if options.source is None or options.target is None:
        raise ConfigError("convert needs a folder to read and a folder to write; see mtp-jax convert --help.")
    if options.to == "hf":
        save_hf_model(options.source, options.target, head=options.head, overwrite=options.overwrite)
    elif options.head is not None:
        raise ConfigError("--head goes with --to hf.")
    else:
        save_orbax_model(options.source, options.target, overwrite=options.overwrite)
    print(options.target)


def _check(options: Namespace) -> None:
    if options.source is None or options.target is not None or options.overwrite or options.head is not None:
        raise ConfigError("convert --check takes one folder, and writes nothing.")
    checked = check_model(options.source)
    family = checked.family
    print(
        f"{options.source}: {checked.depth} fit {family.name}, {checked.num_parameters / 1e9:.3f} G parameters, "
        f"{family.num_mtp_layers} MTP layers with {checked.num_mtp_parameters / 1e9:.3f} G of them"
    )
    facts = {
        "checked": checked.depth,
        "family": family.name,
        "num_parameters": checked.num_parameters,
        "num_mtp_layers": family.num_mtp_layers,
        "num_mtp_parameters": checked.num_mtp_parameters,
    }
    print(json.dumps({"convert_check": str(options.source), **facts}))
