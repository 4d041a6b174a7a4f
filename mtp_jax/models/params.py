"""Parameters that say where they come from: one declaration gives shape, logical axes and checkpoint tensors.

A family's `nnx` modules hold `nnx.Param`s declared with `param(...)` over abstract values. From that one tree follow
the graph definition, the `TensorSpec` table and random weights; nothing is written down twice. Weights themselves
travel as a plain nested dict of arrays, and `ModuleTree.bind` puts them back into modules at trace time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from mtp_jax.models.api import TensorSpec, Weights

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """How an array of `shape` is made from checkpoint tensors, and how they are got back: see `TensorSpec`."""

    shape: Shape
    sources: tuple[str, ...]
    source_shapes: tuple[Shape, ...]
    pack: Callable[[Sequence[np.ndarray]], np.ndarray]
    unpack: Callable[[np.ndarray], tuple[np.ndarray, ...]]

    def then(
        self, shape: Shape, forward: Callable[[np.ndarray], np.ndarray], backward: Callable[[np.ndarray], np.ndarray]
    ) -> "Packing":
        """This packing, followed by an invertible step that gives `shape`."""
        return Packing(
            shape,
            self.sources,
            self.source_shapes,
            lambda arrays: forward(self.pack(arrays)),
            lambda array: self.unpack(backward(array)),
        )

    def reshape(self, *shape: int) -> "Packing":
        """Another shape of as many elements."""
        return self.then(shape, lambda array: array.reshape(shape), lambda array: array.reshape(self.shape))

    def transpose(self, *axes: int) -> "Packing":
        """Dimensions in another order."""
        shape = tuple(self.shape[axis] for axis in axes)
        back = tuple(int(axis) for axis in np.argsort(axes))
        return self.then(shape, lambda array: array.transpose(axes), lambda array: array.transpose(back))

    def take(self, order: np.ndarray) -> "Packing":
        """Rows (first dimension) in another order."""
        back = np.argsort(order)
        return self.then(self.shape, lambda array: array[order], lambda array: array[back])


def same(name: str, *shape: int) -> Packing:
    """The checkpoint's tensor as it is."""
    return Packing(shape, (name,), (shape,), lambda arrays: arrays[0], lambda array: (array,))


def rows(names: Sequence[str], sizes: Sequence[int], *rest: int) -> Packing:
    """Tensors `[size, *rest]` one below the other."""
    ends = [int(end) for end in np.cumsum(sizes)[:-1]]
    return Packing(
        (sum(sizes), *rest),
        tuple(names),
        tuple((size, *rest) for size in sizes),
        np.concatenate,
        lambda array: tuple(np.split(array, ends)),
    )


def stacked(packings: Sequence[Packing]) -> Packing:
    """Equal packings, one for each entry of a new first dimension (experts)."""
    width = len(packings[0].sources)

    def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
        pieces = [arrays[start : start + width] for start in range(0, len(arrays), width)]
        return np.stack([packing.pack(piece) for packing, piece in zip(packings, pieces, strict=True)])

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(part for packing, entry in zip(packings, array, strict=True) for part in packing.unpack(entry))

    return Packing(
        (len(packings), *packings[0].shape),
        tuple(name for packing in packings for name in packing.sources),
        tuple(shape for packing in packings for shape in packing.source_shapes),
        pack,
        unpack,
    )


def param(
    packing: Packing, axes: tuple[str | None, ...], *, fill: float | None = None, dtype: str | None = None
) -> nnx.Param:
    """An abstract parameter: no memory, only the facts. `fill` None: random normal at initialisation.

    `axes` names the logical axis of each dimension, `dtype` pins the dtype: see `TensorSpec`.
    """
    value = jax.ShapeDtypeStruct(packing.shape, jnp.dtype(dtype or "float32"))
    return nnx.Param(value, axes=axes, packing=packing, fill=fill, pinned_dtype=dtype)


class ModuleTree:
    """An abstract module split once: graph definition and parameter table."""

    def __init__(self, module: nnx.Module):
        self._graphdef, state = nnx.split(module)
        self._params: dict[tuple[Any, ...], nnx.Param] = dict(nnx.to_flat_state(state))

    def tensors(self) -> tuple[TensorSpec, ...]:
        """One `TensorSpec` for each parameter."""
        return tuple(_spec(path, variable) for path, variable in self._params.items())

    def init_weights(self, key: Array, dtype: Any, std: float) -> Weights:
        """Normal random matrices, ones for norms, zeros for biases. Parameter i depends on (key, i) only."""
        tree: dict[str, Any] = {}
        for index, (path, variable) in enumerate(self._params.items()):
            facts = variable.get_metadata()
            array_dtype = facts["pinned_dtype"] or dtype
            shape = variable.get_value().shape
            if facts["fill"] is not None:
                array = jnp.full(shape, facts["fill"], array_dtype)
            else:
                noise = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
                array = (std * noise).astype(array_dtype)
            put(tree, _names(path), array)
        return tree

    def bind(self, weights: Weights) -> nnx.Module:
        """The module with these arrays in it. Costs time, so inside a trace; the arrays are not copied."""
        arrays = {path: get(weights, _names(path)) for path in self._params}
        return nnx.merge(self._graphdef, nnx.from_flat_state(arrays))


def get(tree: Weights, path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict at `path`."""
    node: Any = tree
    for name in path:
        node = node[name]
    return node


def put(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    """Sets the leaf of a nested dict at `path`; dicts on the way are made."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in path)


def _spec(path: tuple[Any, ...], variable: nnx.Param) -> TensorSpec:
    facts: Mapping[str, Any] = variable.get_metadata()
    packing: Packing = facts["packing"]
    return TensorSpec(
        path=_names(path),
        shape=variable.get_value().shape,
        axes=facts["axes"],
        sources=packing.sources,
        source_shapes=packing.source_shapes,
        pack=packing.pack,
        unpack=packing.unpack,
        dtype=facts["pinned_dtype"],
    )
