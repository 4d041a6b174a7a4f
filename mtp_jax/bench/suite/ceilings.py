"""What the chip does at best, measured in the same run as what is held against it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_GROUPS = 7


def copy_rate(num_bytes: int) -> float:
    """Bytes a second of x + 1 over `num_bytes` of float32, read and written; the fastest of a few groups."""
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(add(x))
    calls_per_group = 5
    seconds: list[float] = []
    for _ in range(_GROUPS):
        start = time.perf_counter()
        for _ in range(calls_per_group):
            x = add(x)
        jax.block_until_ready(x)
        seconds.append((time.perf_counter() - start) / calls_per_group)
    return 2 * x.nbytes / min(seconds)


def dispatch_us(num_leaves: int, num_donated: int) -> dict[str, float]:
    """Microseconds of the host to call a compiled program of so many arguments that does next to nothing.

    "dispatch": until the call returns; "done": until its result is there.
    """
    leaves = [jnp.ones((8,), jnp.float32) + i for i in range(num_leaves)]
    donated = [jnp.ones((8,), jnp.float32) + i for i in range(num_donated)]

    def touch(kept: list[jax.Array], given: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        return [x + 1 for x in given], sum((x[0] for x in kept), jnp.float32(0))

    step = jax.jit(touch, donate_argnums=1).lower(leaves, donated).compile()
    calls: list[float] = []
    done: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        donated, total = step(leaves, donated)
        calls.append(time.perf_counter() - start)
        jax.block_until_ready(total)
        done.append(time.perf_counter() - start)
    return {"dispatch": 1e6 * statistics.median(calls), "done": 1e6 * statistics.median(done)}


def seconds_of(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
