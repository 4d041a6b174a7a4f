"""Options that commands share, and where values come from: the command line, else `--config`, else a default."""

import argparse
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml

from mtp_jax.core.config import DRAFT_SAMPLINGS, NEAR_LIMIT_RULES, SamplingParams
from mtp_jax.core.errors import ConfigError

NOT_IN_FILES = frozenset({"config", "print_config", "verbose"})
NO_METHOD = "none"


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and leave."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.positionals: set[str] = set()
        self.of_drafting: set[str] = set()

    def add_positional(self, name: str, **settings: Any) -> None:
        """Declares an argument without a flag: it belongs on the command line and not into a file of options."""
        self.positionals.add(name)
        self.add_argument(name, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help.")


def add_common(parser: Parser) -> None:
    """What every command takes."""
    group = parser.add_argument_group("common")
    group.add_argument("--config", metavar="FILE", help="YAML or JSON file of options; the command line wins over it")
    group.add_argument("--print-config", action="store_true", help="print the resolved options as YAML and stop")
    group.add_argument("--verbose", "-v", action="store_true", help="log to stderr, the engine's configuration too")


def add_model(parser: Parser) -> None:
    """Which model, and where it runs."""
    add = parser.add_argument_group("model").add_argument
    add("--model", default="tiny-mtp", help="bundled name, a model folder, or a .gguf file (default: %(default)s)")
    add("--dtype", default="auto", help="auto (float32 on CPU, else the checkpoint's own), float32, bfloat16, float16")
    add("--attention-backend", default="auto", metavar="NAME", help="auto, or one that runs here: see mtp-jax doctor")
    add("--moe-backend", default="reference", metavar="NAME", help="of the experts' products: reference, or mosaic_gpu")
    add("--linear-backend", default="xla", metavar="NAME", help="of products with weights: xla, or mosaic_gpu (bf16)")
    add("--mesh", type=mesh_sizes, metavar="AXIS=N,...", help="devices by axis, such as data=2,model=4")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and output (default: as many as are needed)")
    add("--block-size", type=int, default=16, metavar="N", help="KV positions of a page (default: %(default)s)")
    add("--num-kv-blocks", type=int, metavar="N", help="pages of the KV cache (default: enough for every request)")


def add_compile_cache(parser: Parser, *, default: bool) -> None:
    """Whether compiled programs are kept on disk."""
    parser.add_argument(
        "--compile-cache",
        action=argparse.BooleanOptionalAction,
        default=default,
        help="keep compiled programs in $XDG_CACHE_HOME/mtp_jax/xla (~/.cache/mtp_jax/xla), or where "
        f"JAX_COMPILATION_CACHE_DIR says, so that the next start is quicker (default: {'on' if default else 'off'})",
    )


def add_speculation(parser: Parser, *, policies: Sequence[str]) -> None:
    """How to draft."""
    # These load jax, which `mtp-jax --help` does without.
    from mtp_jax.acceptance.registry import RULES
    from mtp_jax.proposers.registry import method_names

    group = parser.add_argument_group("drafting")

    def add(flag: str, **settings: Any) -> None:
        parser.of_drafting.add(group.add_argument(flag, **settings).dest)

    add("--num-speculative-tokens", type=int, default=3, metavar="K", help="longest draft (default: %(default)s)")
    add(
        "--method",
        default="mtp",
        choices=(*method_names(), NO_METHOD),
        help=f"{NO_METHOD} is plain decoding (default: %(default)s)",
    )
    add(
        "--speculative-model", metavar="DIR", help="the drafter's folder, for methods with a drafter of its own: eagle3"
    )
    if policies:
        add(
            "--policy",
            default=policies[0],
            choices=policies,
            help="goodput: the engine chooses each step's draft length by measured step times and acceptance; "
            "fixed: always K; schedule: by the batch size (default: %(default)s)",
        )
        add(
            "--draft-len-schedule",
            type=draft_lens,
            metavar="SIZE=K,...",
            help="with schedule: draft lengths by the largest batch they are for, such as 4=3,16=1; none beyond",
        )
        add(
            "--near-limit",
            default=NEAR_LIMIT_RULES[0],
            choices=NEAR_LIMIT_RULES,
            help="who drafts less where a request nears the longest text: it alone, or everyone (default: %(default)s)",
        )
        add(
            "--disable-below-acceptance",
            type=float,
            metavar="SHARE",
            help="draft nothing, bar probes, while less than this share of first drafts is kept (default: never)",
        )
        add("--acceptance-window", type=int, metavar="N", help="first drafts that share is taken over (default: 256)")
    add(
        "--draft-vocab-size",
        type=int,
        metavar="N",
        help="draft among the N most frequent tokens only; mtp-jax rank-tokens makes the ranking (default: all)",
    )
    add("--prompt-lookup-min", type=int, metavar="N", help="with ngram: tokens that must match at least (default: 2)")
    add("--prompt-lookup-max", type=int, metavar="N", help="with ngram: tokens that are compared at most (default: 5)")
    add("--tree-topk", type=int, metavar="N", help="with dynamic_tree: continuations of a node (default: 4)")
    add("--tree-nodes", type=int, metavar="N", help="with dynamic_tree: drafts verified a step (default: topk * K)")
    add(
        "--draft-sampling",
        choices=DRAFT_SAMPLINGS,
        help="how drafts are drawn above temperature 0 (default: what goes best with the acceptance rule)",
    )
    add(
        "--acceptance",
        default="match",
        choices=[*RULES],
        help="match: the tokens are plain decoding's; rejection: their law is; relaxed: lossy while a request thinks "
        "(default: %(default)s)",
    )
    add(
        "--block-verification",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="with rejection: judge all drafts of a step as one block, which keeps more of them (default: off)",
    )
    add("--relaxed-topk", type=int, metavar="N", help="with relaxed: a draft must be among the N likeliest tokens")
    add("--relaxed-delta", type=float, metavar="P", help="with relaxed: and at most P less probable than the best")
    add(
        "--synthetic-acceptance",
        type=float,
        nargs="+",
        action="extend",
        metavar="SHARE",
        help="force drafts to stand, in such shares of the steps by position; the text is then not the model's",
    )


def add_sampling(parser: Parser, *, ignore_eos: bool) -> None:
    """How tokens are drawn."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens to write at most (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-k", type=int, default=0, metavar="N", help="draw among the N likeliest tokens; 0 is off (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest of total P; 1 is off (default)")
    for flag, (kind, off, text) in _MORE_SAMPLING.items():
        add(flag, type=kind, default=off, metavar="X", help=f"{text}; %(default)s is off (default)")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same tokens (default: %(default)s)")
    add("--logit-bias", type=logit_biases, metavar="ID=X,...", help="added to the logits of these token ids")
    add("--stop-token-ids", type=int, nargs="+", action="extend", metavar="ID", help="end at these token ids too")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=ignore_eos,
        help=f"write on past end-of-text tokens (default: {'on' if ignore_eos else 'off'})",
    )


def sampling_params(options: Namespace) -> SamplingParams:
    """The options of `add_sampling` as the library takes them."""
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        logit_bias=options.logit_bias,
        ignore_eos=options.ignore_eos,
        **{name: getattr(options, name) for name in (flag[2:].replace("-", "_") for flag in _MORE_SAMPLING)},
    )


_MORE_SAMPLING: dict[str, tuple[type, float, str]] = {
    "--min-p": (float, 0.0, "draw among tokens at least X times as likely as the likeliest"),
    "--min-tokens": (int, 0, "write X tokens before any stop counts"),
    "--presence-penalty": (float, 0.0, "lower the logit of a token that was written by X"),
    "--frequency-penalty": (float, 0.0, "lower it by X for each time"),
    "--repetition-penalty": (float, 1.0, "divide (or multiply, below 0) that of a token of prompt or output by X"),
}
"""Numbers that go to `SamplingParams` as they are."""


def one_data_shard(options: Namespace, command: str) -> None:
    """Raises `ConfigError` where a command that drives one scheduler is given a mesh with several."""
    mesh: Mapping[str, int] = options.mesh or {}
    num_shards = mesh.get("data", 1)
    if num_shards > 1:
        raise ConfigError(f"{command} drives one data shard; --mesh has data={num_shards}.")


def draft_lens(text: str) -> dict[int, int]:
    """Draft lengths by batch size from "4=3,16=1"."""
    return {int(size): int(draft_len) for size, draft_len in _pairs(text)}


def logit_biases(text: str) -> dict[int, float]:
    """Biases by token id from "7=-1.5,9=2"."""
    return {int(token): float(bias) for token, bias in _pairs(text)}


def mesh_sizes(text: str) -> dict[str, int]:
    """Axis sizes from "data=2,model=4". Raises `ValueError` for anything else, as argparse wants it."""
    return {axis: int(size) for axis, size in _pairs(text)}


def _pairs(text: str) -> list[list[str]]:
    return [part.split("=") for part in text.split(",")]


# What argparse calls a value that it cannot read.
mesh_sizes.__name__, draft_lens.__name__, logit_biases.__name__ = "mesh", "draft-len-schedule", "logit-bias"


def read_options(parser: Parser, arguments: Sequence[str]) -> Namespace:
    """The command line, with the values of `--config FILE` for what it leaves open."""
    options = parser.parse_args(arguments)
    if options.config is None:
        return _checked(parser, options, arguments)
    file = Path(options.config)
    known = file_options(parser, options)
    from_file: list[str] = []
    for name, value in _values_in(file).items():
        dest = str(name).replace("-", "_")
        if dest not in known:
            raise ConfigError(f"{file} has no option {name!r} to set; {parser.prog} takes {', '.join(sorted(known))}.")
        if not _is_given(dest, arguments):
            from_file += _as_arguments(dest, value)
    return _checked(parser, parser.parse_args([*from_file, *arguments]), arguments)


def _checked(parser: Parser, options: Namespace, arguments: Sequence[str]) -> Namespace:
    """Raises `ConfigError` for an option of drafting beside `--method none`, which would ignore it.

    A default that the command line repeats is one too, if it asks for anything; in a file, which `--print-config` may
    have written, it is not.
    """
    for name in sorted(parser.of_drafting - {"method"}):
        value = getattr(options, name)
        is_asked_for = value != parser.get_default(name) or (bool(value) and _is_given(name, arguments))
        if options.method == NO_METHOD and is_asked_for:
            raise ConfigError(
                f"{_flag(name)} is {value}, and --method {NO_METHOD} does not draft; leave one of them out."
            )
    return options


def file_options(parser: Parser, options: Namespace) -> dict[str, Any]:
    """The options that a file may set, with their values."""
    outside = NOT_IN_FILES | parser.positionals
    return {name: value for name, value in vars(options).items() if name not in outside}


def as_yaml(parser: Parser, options: Namespace) -> str:
    """Options in the form that `--config` reads."""
    return yaml.safe_dump(file_options(parser, options), sort_keys=False)


def _values_in(file: Path) -> Mapping[str, Any]:
    try:
        values: Any = yaml.safe_load(file.read_text())  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is neither YAML nor JSON.") from error
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"--config {file} must map option names to values.")
    return cast(Mapping[str, Any], values)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _is_given(dest: str, arguments: Sequence[str]) -> bool:
    flags = (_flag(dest), _flag(f"no_{dest}"))
    return any(argument in flags or argument.startswith(f"{flags[0]}=") for argument in arguments)


def _as_arguments(dest: str, value: Any) -> list[str]:
    flag = _flag(dest)
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return [_flag(f"no_{dest}")]
        case Mapping():
            pairs = cast(Mapping[str, Any], value)
            return [f"{flag}={','.join(f'{key}={size}' for key, size in pairs.items())}"]
        case list():
            return [f"{flag}={item}" for item in cast(list[Any], value)]
        case _:
            return [f"{flag}={value}"]
