"""`mtp-jax bench decode --suite NAME`: whole engines at real sizes, against floors and against other ways."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from mtp_jax.bench.environment import chip, versions
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError

SUITES = ("h200", "cpu")
_KERNELS = ("attention_backend", "moe_backend", "linear_backend")
_OWN = ("suite", "parts", "tiny", "save", "peer_python", "batch_sizes", *_KERNELS)
"""Options that a suite has; it sets all others itself."""


def add_options(parser: Parser) -> None:
    """The options of a suite."""
    group = parser.add_argument_group("suite")
    group.add_argument(
        "--suite",
        choices=SUITES,
        help="instead of a model of yours: h200, fixed sizes with random weights against what the chip allows; cpu, "
        "small trained models; both against Hugging Face transformers",
    )
    group.add_argument("--parts", metavar="PART,...", help="of the suite, those to run (default: all)")
    group.add_argument("--tiny", action="store_true", help="the suite on toy sizes, to see that it runs")
    group.add_argument(
        "--peer-python", metavar="FILE", help="an interpreter with torch and transformers (default: this one)"
    )
    group.add_argument("--save", metavar="FILE", help="write the suite's JSON there too, after each part")


def run(options: Namespace, defaults: Namespace) -> None:
    """Runs the suite: a table to stdout as each part ends, all figures as one JSON line last."""
    from mtp_jax.bench.suite.loop import Backends
    from mtp_jax.bench.suite.run import SUITES as PARTS_OF
    from mtp_jax.bench.suite.run import as_text, json_line, run_suite
    from mtp_jax.bench.suite.setting import Findings, Setting
    from mtp_jax.cli.start import use_compile_cache
    from mtp_jax.options import resolve_backend

    _refuse_others(options, defaults)
    own_parts = PARTS_OF[options.suite]
    parts = own_parts if options.parts is None else tuple(options.parts.split(","))
    for part in parts:
        if part not in own_parts:
            raise ConfigError(f"--parts has {part!r}; parts of {options.suite} are {', '.join(own_parts)}.")
    if options.save is not None and not Path(options.save).absolute().parent.is_dir():
        raise ConfigError(f"--save {options.save} is in no folder that exists.")
    use_compile_cache(options.compile_cache)
    make = Setting.tiny if options.tiny else Setting.full
    batch_sizes = tuple(options.batch_sizes or ((1, 2) if options.tiny else (1, 8, 64)))
    if min(batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes has {min(batch_sizes)}; each must be at least 1.")
    dtype = "float32" if options.tiny or options.suite == "cpu" else "bfloat16"
    backends = Backends(
        resolve_backend(options.attention_backend), options.moe_backend, options.linear_backend, dtype=dtype
    )
    setting = replace(make(backends, batch_sizes), peer_python=options.peer_python)
    facts = {
        "suite": options.suite,
        "tiny": options.tiny,
        "chip": chip(),
        "versions": versions(),
        "attention_backend": setting.backends.attention,
        "linear_backend": setting.backends.linear,
        "moe_backend": setting.backends.moe,
        "dtype": setting.backends.dtype,
        "readback_depth": setting.backends.readback_depth,
        "batch_sizes": list(batch_sizes),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    num_shown = 0

    def on_part(name: str, findings: Findings) -> None:
        nonlocal num_shown
        print(f"{name}, {findings.figures[name]['seconds']} s\n{as_text(findings.rows[num_shown:])}\n", flush=True)
        num_shown = len(findings.rows)
        if options.save is not None:
            Path(options.save).write_text(json_line(findings, facts) + "\n")

    findings = run_suite(setting, parts, on_part)
    print(f"{as_text(findings.rows)}\n")
    print(json_line(findings, facts))


def _refuse_others(options: Namespace, defaults: Namespace) -> None:
    """`ConfigError` for an option that a suite would ignore."""
    allowed = {*_OWN, "compile_cache", "config", "print_config", "verbose"}
    for name, value in vars(options).items():
        if name not in allowed and value != getattr(defaults, name, value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} does nothing under --suite, which sets its own; leave it out.")
