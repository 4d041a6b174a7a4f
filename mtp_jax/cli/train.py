"""`mtp-jax train`: a model and its MTP layers together, or the MTP layers alone, on texts of the user's own."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.checkpoints import LoadedModel, load_model
from mtp_jax.checkpoints.convert import TEXT_FILES, copy_files
from mtp_jax.checkpoints.folders import new_folder, read_config, read_json, write_json
from mtp_jax.checkpoints.head import write_head
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import MTP_ROOT, Weights
from mtp_jax.text import tokenizer_of
from mtp_jax.train.export import write_model
from mtp_jax.train.loss import Objective
from mtp_jax.train.new_layers import with_new_layers
from mtp_jax.train.row_lessons import DraftingJudge, RowLessons
from mtp_jax.train.rows import ROWS_SUFFIX, joined, read_rows
from mtp_jax.train.state import MODES, in_dtype
from mtp_jax.train.texts import TEXT_SUFFIXES, tokens_in
from mtp_jax.train.train import Evaluate, Lessons, TrainConfig, Trainer

WINDOW = 256
"""Positions of a window where none are asked for."""
NOT_SETTINGS = frozenset({"config", "print_config", "verbose", "out", "work", "resume", "overwrite", "tensorboard"})
"""Options that a resumed run may give anew: what is trained does not depend on them."""


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_positional(
        "mode", nargs="?", help="joint: target and MTP layers together; heads: the MTP layers, on the target as it is"
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model", default="tiny-mtp", help="bundled name, or a model folder to start from (default: %(default)s)")
    add(
        "--from-scratch",
        action="store_true",
        help="start what is trained from new weights; of the model its config, its tokenizer and the rest are taken",
    )
    add("--new-mtp-layers", type=int, metavar="N", help="give a model that has no MTP layers N new ones (heads only)")
    suffixes = ", ".join(TEXT_SUFFIXES)
    add(
        "--data",
        metavar="PATH",
        action="append",
        help=f"a text, a folder of texts ({suffixes}), results of run-batch (.jsonl), or a packed token file "
        "(.tokens.xz); may be given repeatedly; or, for heads, texts in rows (.npz, of mtp_jax.train.rollouts)",
    )
    add(
        "--held-out",
        metavar="FILE",
        action="append",
        help="texts in rows that the target wrote greedily; the log says how drafting goes through them",
    )
    add("--out", metavar="FOLDER", help="model folder to write; it appears whole or not at all")
    add("--head-only", action="store_true", help="write the MTP layers alone, for convert --head to lay over the model")
    add("--overwrite", action="store_true", help="replace --out if it exists")
    add("--work", metavar="FOLDER", help="log and snapshots (default: --out with .work after it)")
    add("--resume", action="store_true", help="go on from the newest snapshot in --work, to the same bits")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=1000, metavar="N", help="batches to train on (default: %(default)s)")
    add("--batch-size", type=int, default=16, metavar="N", help="windows or rows of a batch (default: %(default)s)")
    add("--window", type=int, metavar="N", help=f"positions of a window (default: {WINDOW}); rows have their own width")
    add("--peak-rate", type=float, default=1e-3, metavar="R", help="highest learning rate (default: %(default)s)")
    add("--warmup-steps", type=int, metavar="N", help="steps up to that rate (default: a twentieth of --steps)")
    add(
        "--depths",
        type=int,
        metavar="D",
        help="MTP passes in the loss (default: one for each MTP layer; of a single one joint 1, heads 3)",
    )
    add("--mtp-weight", type=float, metavar="W", help="of the MTP loss (default: joint 0.3, heads 1)")
    add(
        "--distillation",
        type=float,
        metavar="A",
        help="share of the MTP loss that is the distance from the target's law, not from the text "
        "(default: joint 0, heads 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of batches and new weights (default: %(default)s)")
    add("--compute-dtype", choices=("float32", "bfloat16"), help="(default: float32 on CPU, else bfloat16)")
    add("--data-parallel", type=int, default=1, metavar="N", help="devices that share a batch (default: %(default)s)")
    add("--log-every", type=int, default=50, metavar="N", help="steps between lines of the log (default: %(default)s)")
    add("--tensorboard", metavar="FOLDER", help="write curves for TensorBoard, too; needs its package")
    add(
        "--evaluate-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between looks at --held-out (default: the end)",
    )
    add("--save-every", type=int, default=0, metavar="N", help="steps between snapshots (default: at the end alone)")


def run(options: Namespace) -> None:
    """Trains and writes the model folder, whose name goes to stdout; a progress bar and a summary to stderr."""
    _check_usage(options)
    out = Path(options.out)
    work = Path(options.work or f"{out}.work")
    loaded = load_model(options.model)
    settings = _train_config(options, loaded)
    if not _has_rows(options) and settings.window > loaded.family.max_position_embeddings:
        limit = loaded.family.max_position_embeddings
        raise ConfigError(f"--window is {settings.window}; this model has max_position_embeddings={limit}.")
    config: dict[str, Any] | None = None
    if options.new_mtp_layers is not None:
        family, weights, config = with_new_layers(
            loaded.family, loaded.weights, read_config(loaded.folder), options.new_mtp_layers, options.seed
        )
        loaded = replace(loaded, family=family, weights=weights)
    board = None if options.tensorboard is None else Path(options.tensorboard)
    with new_folder(out, overwrite=options.overwrite) as partial:
        course = _rows_course(options, loaded, settings) if _has_rows(options) else _windows_course(options, loaded)
        trainer = Trainer(loaded.family, settings, course.data, work, tensorboard=board)
        _begin_or_resume(work, options)
        trained, _ = trainer.run(course.start(_start(loaded, options)), evaluate=course.evaluate)
        weights = {**loaded.weights, **trained}
        if options.head_only:
            write_head(partial, loaded.family, in_dtype(loaded.family, weights, loaded.dtype), str(options.model))
        else:
            copy_files(TEXT_FILES, loaded.folder, partial)
            config = config or read_config(loaded.folder)
            write_model(partial, loaded.family, weights, {**_without_dtypes(config), "dtype": loaded.dtype})
    print(_summary(work / "log.jsonl", course.num_tokens), file=sys.stderr)
    print(out)


@dataclass(frozen=True)
class _Course:
    """What is learnt from, how much it is, which of the weights the trainer holds, and what it is judged by."""

    data: np.ndarray | Lessons
    num_tokens: int
    start: Callable[[Weights], Weights]
    evaluate: Evaluate | None = None


def _windows_course(options: Namespace, loaded: LoadedModel) -> _Course:
    tokenizer = tokenizer_of(loaded)
    tokens = np.concatenate([tokens_in(Path(path), loaded.family, tokenizer) for path in options.data])
    return _Course(tokens, len(tokens), lambda weights: weights)


def _rows_course(options: Namespace, loaded: LoadedModel, settings: TrainConfig) -> _Course:
    family = loaded.family
    rows = joined([read_rows(Path(path), family.vocab_size) for path in options.data])
    lessons = RowLessons(
        family,
        loaded.weights,
        rows,
        objective=settings.objective,
        optimiser=settings.optimiser,
        batch_size=settings.batch_size,
        compute_dtype=settings.compute_dtype,
        seed=settings.seed,
    )
    judges = {
        Path(path).stem: DraftingJudge(family, lessons.frozen, read_rows(Path(path), family.vocab_size))
        for path in options.held_out or ()
    }

    def evaluate(layers: Weights) -> dict[str, Any]:
        cast = in_dtype(family, layers, settings.compute_dtype)
        return {name: judge(cast) for name, judge in judges.items()}

    return _Course(lessons, rows.num_answer_tokens, lambda weights: {MTP_ROOT: weights[MTP_ROOT]}, evaluate)


def _has_rows(options: Namespace) -> bool:
    return any(Path(path).suffix == ROWS_SUFFIX for path in options.data)


def _check_usage(options: Namespace) -> None:
    if options.mode not in MODES:
        raise ConfigError(f"train needs what to train, one of {', '.join(MODES)}; it was given {options.mode!r}.")
    for name in ("data", "out"):
        if not getattr(options, name):
            raise ConfigError(f"train needs --{name}; see mtp-jax train --help.")
    for name in ("new_mtp_layers", "head_only"):
        if options.mode != "heads" and getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} goes with `train heads`, which leaves the model as it is.")
    for name in ("save_every", "evaluate_every"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 0.")
    _check_rows(options)
    if Path(options.out).exists() and not options.overwrite:
        raise ConfigError(f"{options.out} exists already; remove it or give --overwrite.")


def _check_rows(options: Namespace) -> None:
    """Whether what is said about rows, and what goes with windows alone, is said where it means something."""
    if not _has_rows(options):
        for name in ("held_out", "evaluate_every"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} goes with texts in rows ({ROWS_SUFFIX}) as --data.")
        return
    if not all(Path(path).suffix == ROWS_SUFFIX for path in options.data):
        raise ConfigError(f"--data has texts in rows ({ROWS_SUFFIX}) and others; one run learns from one kind.")
    if options.mode != "heads":
        raise ConfigError("texts in rows go with `train heads`, which leaves the model as it is.")
    if options.window is not None:
        raise ConfigError("--window goes with --data in windows; rows have their own width.")
    if options.data_parallel != 1:
        raise ConfigError(f"--data-parallel is {options.data_parallel}; texts in rows are learnt from on one device.")
    if options.evaluate_every and not options.held_out:
        raise ConfigError("--evaluate-every needs --held-out FILE, texts to judge the layer by.")


def _train_config(options: Namespace, loaded: LoadedModel) -> TrainConfig:
    is_joint = options.mode == "joint"
    num_layers = loaded.family.num_mtp_layers
    default_depths = num_layers if num_layers > 1 else 1 if is_joint else 3
    depths = options.depths if options.depths is not None else default_depths
    mtp_weight = options.mtp_weight if options.mtp_weight is not None else (0.3 if is_joint else 1.0)
    distillation = options.distillation if options.distillation is not None else (0.0 if is_joint else 1.0)
    warmup_steps = options.warmup_steps if options.warmup_steps is not None else options.steps // 20
    # Not every product of bfloat16 exists on CPUs.
    default_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return TrainConfig(
        mode=options.mode,
        steps=options.steps,
        batch_size=options.batch_size,
        window=WINDOW if options.window is None else options.window,
        peak_rate=options.peak_rate,
        warmup_steps=warmup_steps,
        objective=Objective(depths=depths, mtp_weight=mtp_weight, distillation=distillation),
        compute_dtype=options.compute_dtype or default_dtype,
        seed=options.seed,
        log_every=options.log_every,
        save_every=options.save_every,
        evaluate_every=options.evaluate_every or (options.steps if options.held_out else 0),
        data_parallel=options.data_parallel,
    )


def _start(loaded: LoadedModel, options: Namespace) -> Weights:
    if not options.from_scratch:
        return loaded.weights
    fresh = loaded.family.init_weights(jax.random.key(options.seed), jnp.float32)
    return fresh if options.mode == "joint" else {**loaded.weights, MTP_ROOT: fresh[MTP_ROOT]}


def _begin_or_resume(work: Path, options: Namespace) -> None:
    """Notes what this run is, or checks that it is the one whose snapshots are gone on from."""
    file = work / "settings.json"
    settings = {name: value for name, value in vars(options).items() if name not in NOT_SETTINGS}
    if not options.resume:
        if work.exists():
            raise ConfigError(f"{work} holds an earlier run; give --resume to go on with it, or remove it.")
        work.mkdir(parents=True)
        write_json(file, settings)
        return
    if not file.is_file():
        raise ConfigError(f"{work} holds no run to go on with; leave --resume out.")
    earlier: Mapping[str, Any] = read_json(file)
    for name, value in settings.items():
        if earlier.get(name) != value:
            raise ConfigError(
                f"{name} is {value!r} and was {earlier.get(name)!r} in the run in {work}; resume with the same."
            )


def _without_dtypes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}


def _summary(log: Path, num_tokens: int) -> str:
    """Losses at the first and the last line of the log."""
    lines = log.read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if "loss" in (record := json.loads(line))]
    first, last = records[0], records[-1]
    change = f"loss {first['loss']:.3f} (step {first['step']}) to {last['loss']:.3f} (step {last['step']})"
    return f"{num_tokens:,} tokens of data; {change}; log and snapshots in {log.parent}"
