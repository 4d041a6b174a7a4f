"""Options that say which of several processes this one is, and whether they run one engine together or one each."""

import argparse
from argparse import Namespace

from mtp_jax.batch.team import ALONE, Team, independent, join, place_by_cluster, place_by_options
from mtp_jax.cli.options import Parser
from mtp_jax.core.errors import ConfigError


def add_processes(parser: Parser) -> None:
    """Declares them."""
    group = parser.add_argument_group("several processes, started alike")
    add = group.add_argument
    add("--distributed", action="store_true", help="ask Slurm, Kubernetes, GKE TPU or MPI which process this is")
    add("--process-id", type=int, metavar="I", help="say it: I of N, from 0")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")
    add("--coordinator", metavar="HOST:PORT", help="of process 0; needed where one engine spans all processes")
    add(
        "--independent",
        action=argparse.BooleanOptionalAction,
        help="each process has an engine of its own, on --mesh or all of its devices; otherwise one engine spans them, "
        "on --mesh (default: independent unless there is a --mesh)",
    )


def team_and_mesh(options: Namespace) -> tuple[Team, dict[str, int] | None]:
    """This process's place among the others, connected to them if they share an engine; the mesh of its engine."""
    by_options = options.process_id is not None or options.num_processes is not None
    if options.distributed and by_options:
        raise ConfigError("--distributed asks the cluster; leave --process-id and --num-processes out, or it.")
    if not options.distributed and not by_options:
        for name in ("coordinator", "independent"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} is for several processes; say which one this is, or leave it out.")
        return ALONE, options.mesh
    is_independent = options.mesh is None if options.independent is None else options.independent
    if not is_independent and options.mesh is None:
        raise ConfigError(
            "--no-independent needs --mesh: the devices of all processes by axis, such as data=8,model=4."
        )
    if options.distributed:
        place = place_by_cluster()
    else:
        place = place_by_options(options.coordinator, options.process_id, options.num_processes)
    return independent(place, options.mesh) if is_independent else (join(place, options.mesh), options.mesh)
