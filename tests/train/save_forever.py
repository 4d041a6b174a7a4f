"""Saves one snapshot after another until it is killed: `python -m tests.train.save_forever FOLDER`."""

import sys
from pathlib import Path

import jax.numpy as jnp

from mtp_jax.train.snapshots import Snapshots


def state_at(step: int) -> dict[str, jnp.ndarray]:
    """What step `step` saves: every element tells the step."""
    return {"a": jnp.full((256, 512), step, jnp.float32), "b": jnp.full((64,), step, jnp.int32)}


def main() -> None:
    with Snapshots(Path(sys.argv[1]), keep=2) as snapshots:
        step = snapshots.latest_step()
        if step:
            restored = snapshots.restore(step, state_at(0))
            assert all(bool((leaf == step).all()) for leaf in restored.values())
        print("ready", step, flush=True)
        while True:
            step += 1
            snapshots.save(step, state_at(step))


if __name__ == "__main__":
    main()
