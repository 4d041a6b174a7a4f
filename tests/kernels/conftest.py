"""What tests of kernels share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def interpreter_reset() -> Iterator[None]:
    """Programs traced before a fault was planted hold none, and a fault may leave the interpreter inside a kernel."""
    jax.clear_caches()
    yield
    jax.clear_caches()
