"""`mtp-jax rank-tokens`: a model's tokens by how frequent they are in a text, for a draft shortlist."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np

from mtp_jax.bench.tables import table
from mtp_jax.checkpoints.folders import find_model
from mtp_jax.checkpoints.token_ranking import rank_tokens, write_ranking
from mtp_jax.cli.options import Parser
from mtp_jax.cli.start import load
from mtp_jax.core.errors import ConfigError
from mtp_jax.train.rows import ROWS_SUFFIX, read_rows
from mtp_jax.train.texts import tokens_in

_SMALLEST = 256


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional("model", nargs="?", default="tiny-mtp", help="bundled name, or a model folder")
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="text, a folder of texts, a packed token file (.tokens.xz), results of run-batch (.jsonl), or texts in "
        "rows (.npz), of which the answers count",
    )
    parser.add_argument("--keep", type=int, metavar="N", help="tokens to write, the most frequent ones (default: all)")
    parser.add_argument("--output", metavar="FOLDER", help="where to write token_ranking.npy (default: the model)")
    parser.add_argument("--dtype", default="auto", help="as in generate; of no consequence here")


def run(options: Namespace) -> None:
    """Writes the ranking; a table of what shortlists of several sizes cover to stdout, one JSON line last."""
    if options.data is None:
        raise ConfigError("rank-tokens needs --data FILE, a text like those that the model will write.")
    folder = find_model(options.model) if options.output is None else Path(options.output)
    if not folder.is_dir():
        raise ConfigError(f"--output {folder} is not a folder.")
    model = load(options)
    vocab_size = model.family.vocab_size
    if options.keep is not None and not 1 <= options.keep <= vocab_size:
        raise ConfigError(f"--keep is {options.keep}; it must be from 1 to the vocabulary's {vocab_size}.")
    data = Path(options.data)
    if data.suffix == ROWS_SUFFIX:
        tokens_T = np.concatenate(read_rows(data, vocab_size).answers())
    else:
        tokens_T = tokens_in(data, model.family, model.tokenizer)
    ranking_V = rank_tokens(tokens_T, vocab_size)
    file = write_ranking(folder, ranking_V[: options.keep])
    covered_V = np.cumsum(np.bincount(tokens_T, minlength=vocab_size)[ranking_V]) / len(tokens_T)
    sizes = [size for size in (_SMALLEST << shift for shift in range(20)) if size < vocab_size] + [vocab_size]
    print(table([["draft_vocab_size", "of the text"], *([str(n), f"{covered_V[n - 1]:.4f}"] for n in sizes)]))
    print(f"{file}: {options.keep or vocab_size} tokens, ranked by {len(tokens_T)} of {options.data}\n")
    covered = {str(size): float(covered_V[size - 1]) for size in sizes}
    print(json.dumps({"rank_tokens": str(options.model), "file": str(file), "covered": covered}))
