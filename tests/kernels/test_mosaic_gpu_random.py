"""Two hundred random calls of the Hopper kernels in the interpreter, each held to the oracle. A GPU runs its own in
`python -m kernels_pallas.bench --checks`."""

import jax
import numpy as np
import pytest

from kernels_pallas.paged_attention.arg_specs import ArgSpec, make_inputs
from tests.kernels.oracle import check

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(f"jax {jax.__version__} has no public interpreter for Mosaic GPU", allow_module_level=True)

from tests.kernels.test_mosaic_gpu import run  # noqa: E402 - that module needs what is asked for above

pytestmark = pytest.mark.long


def random_spec(seed: int) -> ArgSpec:
    rng = np.random.default_rng(seed)
    is_wide = seed % 10 == 0
    is_latent = is_wide or rng.random() < 0.4
    num_kv_heads = 1 if is_latent else int(rng.choice([1, 2, 3]))
    v_channels = 512 if is_wide else int(rng.choice([64, 128]))
    rotary = 64 if is_latent else 0
    num_rows = int(rng.integers(1, 9))
    page_size = int(rng.choice([16, 32, 64, 128]))
    edges = [0, 1, page_size - num_rows, page_size - 1, page_size, 2 * page_size - num_rows, 127, -1]
    lengths = [int(rng.choice(edges)) if rng.random() < 0.5 else int(rng.integers(0, 200)) for _ in range(3)]
    parents = (-1, *(int(rng.integers(0, row)) for row in range(1, num_rows)))
    return ArgSpec(
        num_q_heads=num_kv_heads * int(rng.choice([1, 4, 16, 16] if is_wide else [1, 2, 4, 5])),
        num_kv_heads=num_kv_heads,
        k_channels=v_channels + rotary,
        v_channels=v_channels,
        is_latent=is_latent,
        page_size=page_size,
        num_rows=num_rows,
        committed_len=tuple(max(length, -1) for length in lengths),
        scale=float(rng.choice([0.05, 0.3, 2.0])),
        tree_parents=parents if rng.random() < 0.3 else None,
        dtype="float32" if rng.random() < 0.1 else "bfloat16",
    )


@pytest.mark.parametrize("seed", range(200))
def test_random_call(seed: int) -> None:
    spec = random_spec(seed)
    check(run, spec, make_inputs(spec, jax.random.key(seed)))
