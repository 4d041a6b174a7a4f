"""MTP layers for a model that has none."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import MTP_ROOT, ModelFamily, Weights
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.hf_config import NUM_MTP_LAYERS_NAMES
from mtp_jax.models.registry import family_from_config


def with_new_layers(
    family: ModelFamily, weights: Weights, config: Mapping[str, Any], count: int, seed: int
) -> tuple[ModelFamily, Weights, dict[str, Any]]:
    """The model with `count` new MTP layers, and the config that says so.

    Weights are random, but for what a layer makes of the hidden state that it is given: that passes into its block as
    it is, which spares training the search for it. `ConfigError` if it has some already, or if its family knows none.
    """
    if count < 1:
        raise ConfigError(f"new MTP layers: {count}; there must be at least 1.")
    if family.num_mtp_layers:
        raise ConfigError(f"the model has {family.num_mtp_layers} MTP layers already; new ones are for one without.")
    stated = {name: value for name, value in config.items() if name not in NUM_MTP_LAYERS_NAMES}
    config = {**stated, NUM_MTP_LAYERS_NAMES[0]: count}
    widened = family_from_config(config)
    assert isinstance(widened, MtpDecoder)
    fresh = widened.init_weights(jax.random.key(seed), jnp.float32)[MTP_ROOT]
    size = widened.hidden_size
    first = 0 if widened.mtp.hidden_first else size
    layers = {
        depth: {**layer, "join": layer["join"].at[first : first + size].add(jnp.eye(size))}
        for depth, layer in fresh.items()
    }
    return widened, {**weights, MTP_ROOT: layers}, config
