"""`mtp-jax bench attention`: the paged-attention kernels of an NVIDIA Hopper GPU, checked and timed."""

import json
import os
import sys
from argparse import Namespace

import jax

from kernels_pallas.bench import print_tables, run_beside_ceilings, selected
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="TEXT", help="cases whose name holds one of these"
    )
    parser.add_argument("--checks", action="store_true", help="correctness only")
    parser.add_argument("--times", action="store_true", help="times only")
    parser.add_argument(
        "--budget", type=float, default=235.0, metavar="SECONDS", help="after which what still runs is stopped"
    )
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="cases compiled side by side")


def run(options: Namespace) -> None:
    """The table to stdout, one JSON line last; exits with 1 if a case failed."""
    if options.jobs < 1:
        raise ConfigError(f"--jobs is {options.jobs}; it must be at least 1.")
    # Asking for the platform starts it: its memory must be left to the cases' own processes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu":
        raise ConfigError(f"bench attention times the kernels of a GPU; this machine offers {jax.default_backend()!r}.")
    cases = selected(options.only, checks=not options.times, times=not options.checks)
    if not cases:
        raise ConfigError(f"no case's name holds one of {options.only}, or --checks and --times exclude each other.")
    results = run_beside_ceilings(cases, options.jobs, options.budget)
    print_tables(results)
    print(json.dumps(results))
    if any("error" in result for result in results):
        sys.exit(1)
