"""Options of `LLM`: what is unknown or cannot be honoured is refused by name, before anything is loaded."""

import dataclasses
from typing import Any

import pytest

from kernels_pallas.paged_attention import BACKENDS
from mtp_jax import LLM, ConfigError
from mtp_jax.options import engine_config
from mtp_jax.testing.toy_family import ToyFamily


def test_an_unknown_option_is_named_before_the_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="no option 'blok_size'"):
        LLM("no-such-model", blok_size=4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mesh", {"foo": 1}),
        ("mesh", {"data": 3}),
        ("mesh", {"model": 0}),
        ("mesh", [("data", 1)]),
        ("enable_prefix_caching", 1),
        ("numerics", "invariant"),
        ("attention_backend", "fastest"),
        ("moe_backend", "fastest"),
        ("linear_backend", "fastest"),
        ("linear_backend", "mosaic_gpu"),  # a toy has no products of its own
        ("moe_backend", "mosaic_gpu"),  # a model without experts
        ("max_model_len", 10**6),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option.replace("_", ".")):
        engine_config(ToyFamily(), None, **{option: value})


@pytest.mark.parametrize("option", ["method", "policy", "acceptance"])
def test_a_variant_that_no_table_has_is_refused_before_anything_is_compiled(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 'magic'; it must be"):
        engine_config(ToyFamily(), {option: "magic"})


def test_a_depth_is_checked_although_it_is_not_used() -> None:
    with pytest.raises(ConfigError, match="readback_depth"):
        engine_config(ToyFamily(), None, async_scheduling=False, readback_depth=7)
    with pytest.raises(ConfigError, match="readback_depth=2 says otherwise"):
        engine_config(ToyFamily(), None, async_scheduling=False, readback_depth=2)


def test_b12_overlap_is_refused_to_a_backend_that_needs_lengths_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = dataclasses.replace(BACKENDS["reference"], supports_device_lengths=False)
    monkeypatch.setitem(BACKENDS, "limited", limited)
    with pytest.raises(ConfigError, match=r"'limited' needs lengths on the host.*async_scheduling=False"):
        engine_config(ToyFamily(), None, attention_backend="limited")
    config = engine_config(ToyFamily(), None, attention_backend="limited", async_scheduling=False)
    assert config.readback_depth == 0


@pytest.mark.parametrize("mesh", [None, {}, {"data": 1}, {"data": 1, "model": 1}])
def test_a_mesh_of_one_device_is_no_mesh(mesh: dict[str, int] | None) -> None:
    assert engine_config(ToyFamily(), None, mesh=mesh) == engine_config(ToyFamily(), None)
