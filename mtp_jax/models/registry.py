"""The model families by `model_type`: one line each."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily
from mtp_jax.models.deepseek_v3 import deepseek_v3
from mtp_jax.models.glm4_moe import glm4_moe
from mtp_jax.models.hf_config import HfConfig
from mtp_jax.models.llama import LLAMA, MIMO, QWEN2, QWEN3

FAMILIES: dict[str, Callable[[HfConfig, Collection[str] | None], ModelFamily]] = {
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "llama": LLAMA.read,
    "mimo": MIMO.read,
    "qwen2": QWEN2.read,
    "qwen3": QWEN3.read,
}


def family_from_config(config: Mapping[str, Any], tensor_names: Collection[str] | None = None) -> ModelFamily:
    """The family that a Hugging Face `config.json` describes.

    `tensor_names` are the checkpoint's, where it is known: they settle the number of MTP layers together with the
    config. `ConfigError` for an unknown `model_type` or any field that would change the computation.

    >>> family_from_config({"model_type": "gpt2"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: config field 'model_type' is 'gpt2'; allowed: 'deepseek_v3', 'glm4_moe', ...
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        allowed = ", ".join(repr(name) for name in FAMILIES)
        raise ConfigError(f"config field 'model_type' is {model_type!r}; allowed: {allowed}.")
    fields = HfConfig(config)
    family = FAMILIES[model_type](fields, tensor_names)
    fields.refuse_unknown()
    return family
