"""Where arrays live: on one device, or split over a mesh by the logical axes that families name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from mtp_jax.core.config import MeshConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.ops.sharding import Parallel

LOGICAL_AXES = ("vocab", "heads", "kv_heads", "ffn", "experts", "slots")
"""What a dimension can be a number of. `heads`, `kv_heads` and `ffn` are split over `model`, `experts` and `vocab` over
both axes, `slots` (pages too) over `data`; a dimension without a name is whole on every device."""
OVER_BOTH_AXES = frozenset({"experts", "vocab"})


@dataclass(frozen=True)
class AxisRules:
    """The mesh axes of each logical axis."""

    parallel: Parallel

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """Mesh axes that a dimension is split over, outermost first; none for a whole one."""
        if logical is None:
            return ()
        if logical not in LOGICAL_AXES:
            raise ConfigError(f"a dimension has the logical axis {logical!r}; it must be one of {LOGICAL_AXES}.")
        if logical in OVER_BOTH_AXES:
            return self.parallel.mesh_axes
        axis = self.parallel.data if logical == "slots" else self.parallel.model
        return () if axis is None else (axis,)

    def spec(self, *logical: str | None) -> PartitionSpec:
        """Of an array whose dimensions are these. `ConfigError` if two of them claim one mesh axis.

        >>> tuple(AxisRules(Parallel(data="data", model="model")).spec("experts", None))
        (('data', 'model'), None)
        """
        axes = [self.mesh_axes(name) for name in logical]
        claimed = [axis for names in axes for axis in names]
        if len(set(claimed)) < len(claimed):
            raise ConfigError(f"an array has the logical axes {logical}, and two of them share a mesh axis.")
        return PartitionSpec(*(names if len(names) > 1 else (names[0] if names else None) for names in axes))


@dataclass(frozen=True)
class Placement:
    """The devices of an engine. `mesh` None: one device, nothing mapped. An abstract one is for lowering alone."""

    mesh: Mesh | AbstractMesh | None = None

    @classmethod
    def of(cls, config: MeshConfig) -> "Placement":
        """A mesh of the first data x model devices. `ConfigError` if there are fewer, or if they fit no process.

        In several processes every process must hold devices of the mesh, and either all devices of a data shard's
        group of processes or none: processes that share one data shard must share them all.
        """
        if config.num_devices == 1 and jax.process_count() == 1:
            return cls()
        devices = jax.devices()
        if config.num_devices > len(devices):
            raise ConfigError(
                f"mesh={{'data': {config.data}, 'model': {config.model}}} needs {config.num_devices} devices; "
                f"there are {len(devices)}."
            )
        if jax.process_count() > 1 and config.num_devices < len(devices):
            raise ConfigError(
                f"mesh={{'data': {config.data}, 'model': {config.model}}} has {config.num_devices} devices; "
                f"the {jax.process_count()} processes have {len(devices)}, and all of them must be used."
            )
        placement = cls(
            jax.make_mesh(
                (config.data, config.model),
                ("data", "model"),
                axis_types=(AxisType.Auto, AxisType.Auto),
                devices=devices[: config.num_devices],
            )
        )
        placement.check_processes()
        return placement

    @cached_property
    def parallel(self) -> Parallel:
        """The axes that a step is mapped over; an axis of one device is not."""
        if self.mesh is None:
            return Parallel()
        sizes = dict(self.mesh.shape)
        return Parallel(
            data="data" if sizes["data"] > 1 else None,
            model="model" if sizes["model"] > 1 else None,
        )

    @cached_property
    def rules(self) -> AxisRules:
        """Logical axes on this mesh."""
        return AxisRules(self.parallel)

    @cached_property
    def is_voting(self) -> bool:
        """Whether steps must be agreed on: there are several data shards, or several processes."""
        return self.mesh is not None and (self.mesh.shape["data"] > 1 or jax.process_count() > 1)

    @cached_property
    def local_shards(self) -> tuple[int, ...]:
        """The data shards that this process schedules: those with one of its devices."""
        return self.shards_of(jax.process_index())

    @property
    def num_local_shards(self) -> int:
        """How many they are."""
        return len(self.local_shards)

    def shards_of(self, process: int) -> tuple[int, ...]:
        """The data shards that a process schedules: those with one of its devices."""
        if self.mesh is None:
            return (0,)
        assert isinstance(self.mesh, Mesh)  # on an abstract one nothing is scheduled
        rows = self.mesh.devices
        return tuple(i for i, row in enumerate(rows) if any(device.process_index == process for device in row))

    def check_processes(self) -> None:
        """`ConfigError` where two processes share some data shards but not all: they could not keep one queue."""
        seen: dict[int, tuple[int, ...]] = {}
        for process in range(jax.process_count()):
            shards = self.shards_of(process)
            for shard in shards:
                if seen.setdefault(shard, shards) != shards:
                    raise ConfigError(
                        f"data shard {shard} is split over processes that hold the shards {seen[shard]} and {shards}; "
                        "processes that share one data shard must share all of theirs: choose another mesh."
                    )

    # ---- putting arrays

    def sharding(self, spec: PartitionSpec) -> jax.sharding.Sharding:
        """Of an array split by `spec`, or of one on the only device."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(self.mesh, spec)

    def put_rows(self, rows_BX: Int32[np.ndarray, "B X"]) -> Array:
        """This process's data shards' rows, one shard's after another's, as their part of the whole mesh's array."""
        if self.mesh is None:
            return jax.device_put(rows_BX)
        sharding = self.sharding(self.rules.spec("slots", None))
        if jax.process_count() == 1:
            return jax.device_put(rows_BX, sharding)
        num_rows = len(rows_BX) // self.num_local_shards * self.mesh.shape["data"]
        return jax.make_array_from_process_local_data(sharding, rows_BX, (num_rows, rows_BX.shape[1]))

    def put(self, tree: Any, specs: Any) -> Any:
        """A tree of whole arrays, the same on every process, split by a tree of `PartitionSpec`."""
        return jax.tree.map(lambda spec, x: self.put_one(x, spec), specs, tree, is_leaf=_is_spec)

    def put_one(self, x: Any, spec: PartitionSpec) -> Array:
        """One array of such a tree. Each device is sent its own part, and nothing else."""
        sharding = self.sharding(spec)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:  # loaded onto the mesh, part by part
            return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def build(self, make: Callable[[], Any], specs: Any) -> Any:
        """`make()` run on the devices, each of which makes its own part."""
        if self.mesh is None:
            return jax.device_put(make(), self.sharding(PartitionSpec()))
        return jax.jit(make, out_shardings=jax.tree.map(self.sharding, specs, is_leaf=_is_spec))()

    def map(self, step: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`step` on every device's part. Without a mesh: `step` itself."""
        if self.mesh is None:
            return step
        # Attention backends know no mesh: their loops start from constants, which `check_vma` would want cast to every
        # mapped axis, and a `pallas_call` says nothing of such axes. That no sum is missing is tested instead: families
        # under `check_vma`, whole engines by comparing what the devices of a data shard hold.
        return jax.shard_map(step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
