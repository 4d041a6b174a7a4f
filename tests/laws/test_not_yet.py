"""Behaviours that wait for a feature: strict, so that the feature cannot arrive without its test."""

import pytest

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.options import engine_config
from mtp_jax.testing.toy_family import ToyFamily


@pytest.mark.xfail(strict=True, raises=ConfigError, reason="there are no draft trees yet")
def test_b07_tree_keeps_explicit_zero() -> None:
    engine_config(ToyFamily(), SpeculativeConfig(method="dynamic_tree", num_speculative_tokens=3))


@pytest.mark.xfail(strict=True, raises=ConfigError, reason="there is no rejection sampling yet")
def test_b08_zero_and_back_is_exact_under_sampling() -> None:
    engine_config(ToyFamily(), SpeculativeConfig(acceptance="rejection"))
