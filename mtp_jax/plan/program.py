"""The step as an engine compiles it, over weights and state that have shapes and no values.

A program of the full depth takes long to compile and says little that a short one does not: layers of a kind are
alike. So what is lowered has one layer of each kind, and once more with one layer more of each kind in turn; what the
difference is, a layer of that kind adds. `Depth` says which, and a plan repeats it.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mtp_jax.acceptance.registry import rule_of
from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.layout import AgreedColumn, Column, VoteColumn
from mtp_jax.core.shapes import StepShape
from mtp_jax.core.types import DecodeState
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.params import put
from mtp_jax.models.sharding import weight_specs
from mtp_jax.ops.placement import Placement
from mtp_jax.plan.chips import Slice
from mtp_jax.plan.hlo import Collectives, read_collectives
from mtp_jax.proposers.registry import PROPOSERS, resolve_method
from mtp_jax.step.program import StepProgram, init_state, state_specs
from mtp_jax.step.run import make_run


@dataclass(frozen=True)
class Depth:
    """Target layers by kind."""

    dense: int
    experts: int

    @classmethod
    def of(cls, family: MtpDecoder) -> "Depth":
        """All of a family's."""
        if family.moe is None:
            return cls(family.num_layers, 0)
        experts = sum(family.moe_layers[: family.num_layers])
        return cls(family.num_layers - experts, experts)

    @property
    def shortest(self) -> "Depth":
        """One layer of each kind that there is."""
        return Depth(min(self.dense, 1), min(self.experts, 1))

    def increments(self) -> Mapping["Depth", int]:
        """Depths with one layer more of a kind than the shortest, and how often that layer comes beyond it."""
        shortest = self.shortest
        more = {
            Depth(shortest.dense + 1, shortest.experts): self.dense - shortest.dense,
            Depth(shortest.dense, shortest.experts + 1): self.experts - shortest.experts,
        }
        return {depth: count for depth, count in more.items() if count > 0}


def of_depth(family: MtpDecoder, depth: Depth) -> MtpDecoder:
    """The family with so many layers, dense ones first; MTP layers stay as they are."""
    mtp_layers = family.moe_layers[family.num_layers :]
    layers = (False,) * depth.dense + (True,) * depth.experts
    return replace(family, num_layers=len(layers), moe_layers=layers + mtp_layers)


@dataclass(frozen=True)
class Target:
    """Where a program is to run. `mesh` has the compiler's own devices where it is to be compiled, else none."""

    slice: Slice
    mesh: AbstractMesh | Mesh

    @cached_property
    def placement(self) -> Placement:
        """Arrays on it."""
        return Placement(self.mesh)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        return self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh


def abstract_target(where: Slice, config: EngineConfig) -> Target:
    """For lowering: needs no compiler of the platform."""
    sizes = (config.mesh.data, config.mesh.model)
    return Target(where, AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto)))


@dataclass(frozen=True)
class PlannedStep:
    """A decode step of `family` under `config`, for `target`."""

    family: MtpDecoder
    config: EngineConfig
    dtype: str
    target: Target

    @cached_property
    def program(self) -> StepProgram:
        """As `Engine` puts it together."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan says itself what it drafts
            method, _ = resolve_method(self.config.speculative, self.family)
        parallel = self.target.placement.parallel
        return StepProgram(
            family=self.family,
            proposer=PROPOSERS[method].build(self.family, self.config.speculative),
            rule=rule_of(self.config.speculative),
            attention_backend=self.config.attention_backend,
            num_stop_ids=self.config.max_stop_token_ids,
            list_sizes=self.config.list_sizes,
            max_logprobs=self.config.max_logprobs,
            topology=self.config.topology,
            parallel=parallel,
            is_voting=self.config.mesh.data > 1,
        )

    def weights(self) -> dict[str, Any]:
        """Shapes, dtypes and placement of all weights."""
        tree: dict[str, Any] = {}
        for spec in self.family.tensors():
            put(tree, spec.path, self._abstract(spec.shape, spec.dtype or self.dtype, spec.axes))
        return tree

    def state(self) -> DecodeState:
        """Shapes, dtypes and placement of the state."""
        dtype = jnp.dtype(self.dtype)
        shapes = jax.eval_shape(lambda: init_state(self.program, self.config, dtype))
        return jax.tree.map(
            lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.target.mesh, spec)),
            self._state_specs,
            shapes,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def lower(self, shape: StepShape) -> Any:
        """The lowered program for the target's platform."""
        placement = self.target.placement
        step = make_run(
            self.program,
            shape,
            placement,
            weight_specs=weight_specs(self.family, placement.rules),
            state_specs=self._state_specs,
        )
        config = self.config
        vote = len(AgreedColumn) + len(VoteColumn) if self.program.is_voting else 0
        width = len(Column) + config.max_stop_token_ids + config.pages_per_slot + vote
        packed = self._abstract((config.mesh.data * shape.slots, width), "int32", ("slots", None))
        arguments = (self.weights(), self.state(), packed)
        with jax.sharding.use_abstract_mesh(self.target.abstract_mesh):
            traced = jax.jit(step, donate_argnums=1).trace(*arguments)
            if isinstance(self.target.mesh, AbstractMesh):
                return traced.lower(lowering_platforms=(self.target.slice.chip.platform,))
            return traced.lower()

    def collectives(self, shape: StepShape) -> Collectives:
        """What the lowered program exchanges, before a compiler joins or splits any of it."""
        where = self.target.slice
        text = self.lower(shape).as_text("hlo")
        return read_collectives(text, num_devices=where.num_devices, devices_per_host=where.devices_per_host)

    @cached_property
    def _state_specs(self) -> DecodeState:
        return state_specs(self.program, self.config, jnp.dtype(self.dtype), self.target.placement.rules)

    def _abstract(self, shape: tuple[int, ...], dtype: str, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        spec = self.target.placement.rules.spec(*axes)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(self.target.mesh, spec))


def compiler_target(where: Slice, config: EngineConfig) -> Target:
    """For compiling, with the platform's compiler and none of its devices. `ConfigError` where it is not installed."""
    sizes = (config.mesh.data, config.mesh.model)
    try:
        devices = _devices(where)
    except Exception as error:  # whatever a plugin that is missing, or refuses the topology, makes of it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--compile needs the compiler for {where.name!r} ({reason}): install the extra 'aot', or leave it out."
        ) from error
    axis_types = (AxisType.Auto, AxisType.Auto)
    return Target(where, Mesh(np.array(devices).reshape(sizes), ("data", "model"), axis_types=axis_types))


def _devices(where: Slice) -> list[Any]:
    from jax.experimental import topologies

    if where.chip.platform == "tpu":
        options: dict[str, Any] = {}
        if where.num_chips == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        return topologies.get_topology_desc(platform="tpu", topology_name=where.name, **options).devices
    per_host = min(where.num_chips, where.chip.chips_per_host or where.num_chips)
    if where.num_chips % per_host:
        raise ConfigError(f"{where.num_chips} GPUs do not fill hosts of {per_host}")
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=_HOPPER, topology=f"1x{where.num_chips // per_host}x{per_host}"
    ).devices


_HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } device_description_str: "NVIDIA H200"
"""
"""What XLA's compiler asks a Hopper GPU of itself; of memory an H200's."""
