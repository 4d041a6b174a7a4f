"""A model of any size without a checkpoint: random numbers for weights. Its text is noise, its speed is not."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config


def random_model(config_file: Path, dtype: str) -> tuple[ModelFamily, Weights]:
    """The family of a `config.json`, and weights drawn as it initializes them. `ConfigError` for an unreadable file."""
    try:
        config = json.loads(config_file.read_text())
    except OSError as error:
        raise ConfigError(f"{config_file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{config_file} is not JSON.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{config_file} must hold an object of config fields.")
    family = family_from_config(config)
    return family, family.init_weights(jax.random.key(0), jnp.dtype(dtype))
