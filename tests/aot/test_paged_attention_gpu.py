"""The Hopper kernels are accepted by ptxas for an H200 that is not here: shared memory, registers, and few spills."""

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, ArgSpec
from kernels_pallas.paged_attention.mosaic_gpu import paged_attention_gpu, supports
from mtp_jax.plan.program import _HOPPER

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA compiler: install the extra `aot`"
)

GQA = replace(ARG_SPECS["gqa_32_8_uniform"], page_size=64)
MLA_16 = ARG_SPECS["mla_16_uniform"]
TREE = (-1, 0, 0, 1, 1, 2, 2)
KERNELS: Mapping[str, tuple[ArgSpec, str, int]] = {
    "gqa, 7 rows of a tree": (replace(GQA, num_rows=7, tree_parents=TREE), "", 16),
    "mla 16 heads, 1 row": (MLA_16, "_turned", 0),
    "mla 16 heads, 2 rows of a tree, page 16": (
        replace(MLA_16, num_rows=2, tree_parents=TREE[:2], page_size=16),
        "_turned",
        32,
    ),
    "mla 16 heads, 4 rows": (replace(MLA_16, num_rows=4), "_latent", 128),
}
"""What is called; the end of the attention kernel's name; bytes of registers that its threads may spill."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if "tree" in name else []) for name in KERNELS]
)
def test_ptxas_takes_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ending, spills = KERNELS[name]
    reason = supports(spec.problem())
    if reason is not None:
        pytest.skip(reason)  # an older jax
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    compile_for_h200(functools.partial(paged_attention_gpu, config=spec.config("mosaic_gpu")), spec)
    stores = {}
    for path in tmp_path.glob("*.ptxas"):
        kernel = re.sub(r"_\d+$", "", path.stem)
        stores[kernel] = max(map(int, re.findall(r"(\d+) bytes spill stores", path.read_text())))
    attention = f"paged_attention_mosaic_gpu{ending}"
    assert stores.pop(attention) <= spills
    assert set(stores.values()) == {0}  # the combine


def compile_for_h200(function: functools.partial[jax.Array], spec: ArgSpec) -> None:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("", platform="cuda", target_config=_HOPPER, topology="1x1x1")
    mesh = Mesh(np.array(topology.devices), ("gpu",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = (len(spec.committed_len), spec.num_rows)
    pool = (spec.num_pages, spec.page_size, spec.num_kv_heads)

    def array(*shape: int, dtype: str = spec.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    arrays = (
        array(*rows, spec.num_q_heads, spec.k_channels),
        array(*pool, spec.k_channels),
        None if spec.is_latent else array(*pool, spec.v_channels),
        array(rows[0], spec.pages_per_slot, dtype="int32"),
        array(rows[0], dtype="int32"),
        None if spec.tree_parents is None else array(*rows, dtype="uint32"),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compile()
