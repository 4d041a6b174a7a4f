"""Model families: config to forward pass, weight names, KV layout."""

from mtp_jax.models.api import ModelFamily as ModelFamily
from mtp_jax.models.registry import FAMILIES as FAMILIES
from mtp_jax.models.registry import family_from_config as family_from_config
