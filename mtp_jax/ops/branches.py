"""Branches on what a launch needs: of the program where it is known when that is compiled, else of the device."""

from collections.abc import Callable
from typing import TypeVar

from jax import lax
from jaxtyping import Array, Bool

Result = TypeVar("Result")


def if_needed(
    is_needed: Bool[Array, ""] | bool, computed: Callable[[], Result], otherwise: Callable[[], Result]
) -> Result:
    """`computed()` or `otherwise()`; a plain bool decides here and leaves nothing of the other in the program.

    On a GPU a branch makes the host wait for the number that it follows, and ends the launch of kernels ahead.

    >>> if_needed(False, lambda: 1, lambda: 2)
    2
    """
    if isinstance(is_needed, bool):
        return computed() if is_needed else otherwise()
    return lax.cond(is_needed, computed, otherwise)
