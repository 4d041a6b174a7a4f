"""`mtp-jax plan`: a model on accelerators that are not here: what fits, how fast a step can be, how much to draft."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from mtp_jax.bench.tables import table
from mtp_jax.cli.options import NO_METHOD, Parser, mesh_sizes
from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.options import mesh_config

METHODS = ("mtp", "mtp_eagle", "mtp_vanilla", "ngram", NO_METHOD)


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    add = parser.add_argument_group("what, and where").add_argument
    add("--model", metavar="CONFIG", help="deepseek-v3, a config.json, a model folder or a bundled name; no weights")
    add("--topology", metavar="CHIP:SIZE", help="v5e:2x4, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1 (chips), h100:8 or h200:16")
    add("--mesh", type=mesh_sizes, metavar="AXIS=N,...", help="devices by axis (default: all of them as model)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="default: %(default)s")
    add("--attention-backend", metavar="NAME", help="default: the kernel for this chip")
    add("--moe-backend", default="reference", metavar="NAME", help="of the experts' products: reference, or mosaic_gpu")
    load = parser.add_argument_group("load").add_argument
    load("--context", type=int, metavar="N", help="tokens in every slot (default: 4096, or the model's own limit)")
    load("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128], metavar="B", help="default: 1 8 32 128")
    load("--block-size", type=int, default=64, metavar="N", help="KV positions of a page (default: %(default)s)")
    load("--memory-share", type=float, default=0.9, metavar="S", help="of a device's memory (default: %(default)s)")
    draft = parser.add_argument_group("drafting").add_argument
    draft("--method", default="mtp", choices=METHODS, help="default: %(default)s")
    draft("--num-speculative-tokens", type=int, default=3, metavar="K", help="longest draft (default: %(default)s)")
    draft("--accepted-per-pos", type=float, nargs="+", metavar="S", help="steps in which drafts stand, by position")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile with the platform's compiler (extra aot; minutes): temporaries are its, not an estimate",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it: a .png or .svg file (extra plot)")


def run(options: Namespace) -> None:
    """Tables to stdout, one JSON line last."""
    # These load jax, which `mtp-jax --help` does without.
    from mtp_jax.plan import Question, make_plan, planned_family, slice_named
    from mtp_jax.plan.plan import num_lowered
    from mtp_jax.plan.plot import check_plot, draw
    from mtp_jax.plan.text import as_json, choice_rows, exchange_rows, facts, fit_rows, floor_rows, memory_rows

    if options.model is None or options.topology is None:
        raise ConfigError("plan needs --model CONFIG and --topology CHIP:SIZE.")
    plot = None if options.plot is None else Path(options.plot)
    if plot is not None:
        check_plot(plot)
    where, family = slice_named(options.topology), planned_family(options.model)
    question = Question(
        family=family,
        where=where,
        mesh=mesh_config(options.mesh or {"model": where.num_devices}),
        speculative=_speculative(options),
        dtype=options.dtype,
        context=min(4096, family.max_position_embeddings) if options.context is None else options.context,
        batch_sizes=tuple(sorted(set(options.batch_sizes))),
        page_size=options.block_size,
        attention_backend=options.attention_backend,
        moe_backend=options.moe_backend,
        memory_share=options.memory_share,
        accepted_per_pos=None if options.accepted_per_pos is None else tuple(options.accepted_per_pos),
        wants_compile=options.compile,
    )
    with _bar(num_lowered(question)) as on_program:
        plan = make_plan(question, on_program)
    print("\n".join(f"{name}: {value}" for name, value in facts(plan).items()), end="\n\n")
    for rows in (memory_rows(plan), fit_rows(plan), exchange_rows(plan), floor_rows(plan), choice_rows(plan)):
        if len(rows) > 1:
            print(table(rows), end="\n\n")
    print(f"largest batch at {question.context} tokens each: {plan.largest_batch}", end="\n\n")
    if plot is not None:
        draw(plan, plot)
    print(json.dumps({"plan": as_json(plan)}))


def _speculative(options: Namespace) -> SpeculativeConfig:
    if options.method == NO_METHOD:
        if options.accepted_per_pos is not None:
            raise ConfigError(f"--accepted-per-pos is of drafts, and --method {NO_METHOD} makes none.")
        return SpeculativeConfig(method=None)
    return SpeculativeConfig(method=options.method, num_speculative_tokens=options.num_speculative_tokens)


@contextmanager
def _bar(total: int) -> Iterator:
    with tqdm(total=total, desc="lowering", unit="program", disable=None) as bar:

        def on_program(what: str) -> None:
            bar.set_postfix_str(what, refresh=True)
            bar.update()

        yield on_program
