"""The rules of ``tests/conftest.py`` hold in the tests."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from mtp_jax.models.layers import rms_norm
from mtp_jax.testing.engines import without_optimizations


def test_tests_see_eight_cpu_devices(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--gpu"):
        pytest.skip("runs on the GPU")
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_mixing_types_is_an_error() -> None:
    with pytest.raises(ValueError, match="promotion"):
        jnp.add(jnp.ones(2, jnp.int32), jnp.ones(2, jnp.float32))


def test_mixing_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank"):
        jnp.add(jnp.ones((2, 2)), jnp.ones(2))


@pytest.mark.standard_promotion("shows that the marker works")
def test_the_marker_relaxes_both() -> None:
    total = jnp.ones((2, 2), jnp.int32) + jnp.ones(2, jnp.float32)
    assert total.dtype == jnp.float32


def test_a_warning_is_an_error() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_a_wrong_shape_is_an_error() -> None:
    assert rms_norm(jnp.ones((2, 4)), jnp.ones(4), 1e-6).shape == (2, 4)
    with pytest.raises(TypeCheckError):
        rms_norm(jnp.ones((2, 4)), jnp.ones(3), 1e-6)


@pytest.mark.parametrize("before", [False, True])
def test_compiling_fast_leaves_the_option_as_it_was(before: bool) -> None:
    jax.config.update("jax_disable_most_optimizations", before)
    assert without_optimizations(lambda: jax.config.read("jax_disable_most_optimizations"))
    assert jax.config.read("jax_disable_most_optimizations") is before
