"""Compiling for TPUs that are not here. What is compiled cannot be run: these tests know no numbers and no times."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtp_jax.plan.compiled import without_compile_cache

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler (libtpu): install the extra `aot`"
)

TOPOLOGIES: dict[str, tuple[str, list[int] | None]] = {
    "v5e": ("v5e:1x1", [1, 1, 1]),
    "v5p": ("v5p:2x2x1", None),
    "v6e": ("v6e:2x2", None),
    "tpu7x": ("tpu7x:2x2x1", None),
}
"""The smallest topology of a generation that the compiler knows, and the chips of a host where it must be told."""


@functools.cache
def one_chip(generation: str) -> Mesh:
    """A mesh of one chip."""
    name, bounds = TOPOLOGIES[generation]
    options: dict[str, Any] = {} if bounds is None else {"chips_per_host_bounds": bounds}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return Mesh(np.array(topology.devices[:1]), ("chip",))


def compile_for(generation: str, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    """The function compiled for one chip; arguments are pytrees of anything that has a shape and a dtype."""
    mesh = one_chip(generation)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def on_chip(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=everywhere)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), without_compile_cache():
        lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(on_chip, arguments))
        return lowered.compile()
