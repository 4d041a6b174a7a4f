"""`mtp-jax eval-heads`: how often a model would accept its own MTP drafts on a given text, by depth."""

import json
from argparse import Namespace
from pathlib import Path

from mtp_jax.bench.tables import table
from mtp_jax.cli.options import Parser
from mtp_jax.cli.start import load
from mtp_jax.core.errors import ConfigError
from mtp_jax.train.evaluate import evaluate_heads
from mtp_jax.train.texts import tokens_in


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional("model", nargs="?", default="tiny-mtp", help="bundled name, or a model folder")
    parser.add_argument("--data", metavar="FILE", help="text, a folder of texts, or a packed token file (.tokens.xz)")
    parser.add_argument("--depths", type=int, default=3, metavar="D", help="drafts a step (default: %(default)s)")
    parser.add_argument(
        "--window", type=int, default=512, metavar="N", help="positions a window (default: %(default)s)"
    )
    parser.add_argument("--max-windows", type=int, metavar="N", help="windows to use (default: the whole text)")
    parser.add_argument(
        "--dtype", default="auto", help="auto (float32 on CPU, else the checkpoint's own), float32, bfloat16"
    )


def run(options: Namespace) -> None:
    """A table to stdout, one JSON line last."""
    if options.data is None:
        raise ConfigError("eval-heads needs --data FILE, a text that the model was not trained on.")
    for name in ("depths", "window", "max_windows"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    model = load(options)
    tokens = tokens_in(Path(options.data), model.family, model.tokenizer)
    report = evaluate_heads(
        model.family,
        model.weights,
        tokens,
        depths=options.depths,
        window=options.window,
        max_windows=options.max_windows,
    )
    columns = {
        "given all before accepted": report.conditional,
        "accepted with all before": report.cumulative,
        "control": report.control,
        "chance": report.chance,
    }
    by_depth = zip(*columns.values(), strict=True)
    rows = [[str(depth), *(f"{share:.3f}" for share in shares)] for depth, shares in enumerate(by_depth, start=1)]
    print(table([["depth", *columns], *rows]))
    print(f"{report.mean_acceptance_length:.2f} tokens a step, over {report.num_steps} steps\n")
    print(json.dumps({"eval_heads": str(options.model), "data": options.data, **report.as_dict()}))
