"""A family's weights on a mesh: how each is split, and whether it can be."""

from typing import Any

from mtp_jax.core.config import MeshConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.params import put
from mtp_jax.ops.placement import OVER_BOTH_AXES, AxisRules


def weight_specs(family: ModelFamily, rules: AxisRules) -> Weights:
    """A `PartitionSpec` for each weight, in a tree like the weights' own."""
    specs: dict[str, Any] = {}
    for tensor in family.tensors():
        put(specs, tensor.path, rules.spec(*tensor.axes))
    return specs


def check_mesh(family: ModelFamily, mesh: MeshConfig) -> None:
    """`ConfigError` if the model's heads, experts, vocabulary, ... cannot be split into equal parts over the mesh."""
    sizes = {(axis, size) for tensor in family.tensors() for axis, size in zip(tensor.axes, tensor.shape, strict=True)}
    sizes |= {(spec.axis, spec.num_kv_heads) for spec in (*family.kv_specs(), *family.draft_kv_specs())}
    sizes.add(("vocab", family.vocab_size))  # logits are split even where no tensor is
    for axis, size in sorted((axis, size) for axis, size in sizes if axis is not None):
        parts = mesh.num_devices if axis in OVER_BOTH_AXES else mesh.model
        if size % parts != 0:
            raise ConfigError(
                f"{family.name} has {size} {_WORDS.get(axis, axis)}; "
                f"mesh={{'data': {mesh.data}, 'model': {mesh.model}}} needs a multiple of {parts}."
            )


_WORDS = {
    "vocab": "vocabulary entries",
    "heads": "attention heads",
    "kv_heads": "KV heads",
    "ffn": "feed-forward channels",
}
