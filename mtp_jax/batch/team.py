"""The processes of a job: which this one is, and whether they run one engine together or one each.

Independent processes (the default) share nothing but the folder of results. Each has an engine of its own over its own
devices, so there is no vote to take part in, one that dies takes nobody along, and their number may change from one
start to the next. With a mesh over all processes there is one engine, for models that no single process could hold;
then every step is voted on, and a process that dies ends the job until it is started again.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from mtp_jax.batch.shares import Share, shares_of
from mtp_jax.core.config import MeshConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.ops.placement import Placement

_NO_CLUSTER = "give --process-id and --num-processes instead."


@dataclass(frozen=True)
class Team:
    """This process among the others. `is_together`: they run one engine, so all must join its steps.

    `on_host`: its number among those of its host, where the cluster says so.
    """

    share: Share
    process: int = 0
    num_processes: int = 1
    is_together: bool = False
    on_host: int = 0

    def wait(self) -> None:
        """Until all processes of one engine are here; independent ones never wait."""
        if self.is_together and self.num_processes > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("mtp_jax.batch")

    def part(self) -> None:
        """Leaves the others: what comes now concerns files alone."""
        if self.is_together and self.num_processes > 1:
            jax.distributed.shutdown()


ALONE = Team(Share())


@dataclass(frozen=True)
class Place:
    """Where this process stands, as the command line or the cluster says. `local_devices`: those it may use."""

    coordinator: str | None
    process: int
    num_processes: int
    local_devices: tuple[int, ...] | None = None

    @property
    def on_host(self) -> int:
        """Clusters that start a process for each device give it the device of its number; others start one a host."""
        return 0 if self.local_devices is None else self.local_devices[0]


def place_by_options(coordinator: str | None, process: int | None, num_processes: int | None) -> Place:
    """From `--coordinator`, `--process-id` and `--num-processes`. `ConfigError` for numbers that do not fit."""
    if process is None or num_processes is None:
        raise ConfigError("--process-id and --num-processes go together; give both, or --distributed.")
    if not 0 <= process < num_processes:
        raise ConfigError(f"--process-id is {process}; it must be from 0 to --num-processes - 1 = {num_processes - 1}.")
    return Place(coordinator, process, num_processes)


def place_by_cluster() -> Place:
    """From what Slurm, Kubernetes, GKE or a TPU pod tell their processes, as jax reads it. `ConfigError` elsewhere."""
    # The one way to ask jax without joining the others, which independent processes must not.
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, num_processes, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, 300
        )
    except Exception as error:  # each cluster has its own way to say that it is not set up
        raise ConfigError(
            f"--distributed: the cluster's description could not be read ({error}); {_NO_CLUSTER}"
        ) from error
    if process is None or num_processes is None:
        raise ConfigError(f"--distributed: this is no Slurm, Kubernetes, GKE TPU or MPI job; {_NO_CLUSTER}")
    return Place(coordinator, process, num_processes, None if devices is None else tuple(devices))


def join(place: Place, mesh: Mapping[str, int]) -> Team:
    """One engine over all processes: connects them, and shares the lines out by data shard."""
    if place.coordinator is None and place.num_processes > 1:
        raise ConfigError("a mesh over several processes needs --coordinator HOST:PORT, of process 0.")
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process,
        local_device_ids=place.local_devices,
    )
    return team_of(place, mesh)


def team_of(place: Place, mesh: Mapping[str, int]) -> Team:
    """The shares of processes that are connected already."""
    placement = Placement.of(MeshConfig(**mesh))
    shards = [placement.shards_of(process) for process in range(place.num_processes)]
    share = shares_of(shards, mesh.get("data", 1))[place.process]
    return Team(share, place.process, place.num_processes, is_together=True, on_host=place.on_host)


def independent(place: Place, mesh: Mapping[str, int] | None) -> tuple[Team, dict[str, int] | None]:
    """An engine of this process's own, and its mesh: all of its devices as data shards unless `mesh` says."""
    if place.local_devices is not None:
        visible = ",".join(map(str, place.local_devices))
        for option in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            with contextlib.suppress(AttributeError):
                jax.config.update(option, visible)
    if jax.process_count() > 1:
        raise ConfigError(
            f"the devices of these {jax.process_count()} processes are one slice and run one engine; give a --mesh "
            f"over all {len(jax.devices())} of them, or slices of one host each."
        )
    num_devices = len(jax.local_devices())
    own = dict(mesh) if mesh is not None else ({"data": num_devices} if num_devices > 1 else None)
    shards = (place.process,)
    share = Share(place.process, place.num_processes, shards, place.num_processes)
    return Team(share, place.process, place.num_processes, on_host=place.on_host), own


def describe(team: Team) -> dict[str, Any]:
    """For logs."""
    return {"process": team.process, "num_processes": team.num_processes, "one_engine": team.is_together}
