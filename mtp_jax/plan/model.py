"""The family that a plan is made for: from a config alone, without any weights."""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from mtp_jax.checkpoints.folders import CONFIG_FILE, find_model, read_config, read_json
from mtp_jax.checkpoints.fp8 import plain_config
from mtp_jax.core.errors import ConfigError
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.registry import family_from_config


def published_names() -> tuple[str, ...]:
    """Models whose config comes with the project, without weights.

    >>> "deepseek-v3" in published_names()
    True
    """
    return tuple(sorted(file.name.removesuffix(".json") for file in _configs().iterdir()))


def planned_family(model: str) -> MtpDecoder:
    """The family of a name of `published_names`, a bundled model, a model folder, or a `config.json`.

    `ConfigError` where there is none, and for what its config asks of a family.
    """
    family = family_from_config(plain_config(_config(model))[0])
    if not isinstance(family, MtpDecoder):
        raise ConfigError(f"{model} is of family {family.name!r}, which a plan cannot be made for.")
    return family


def _config(model: str) -> Mapping[str, Any]:
    if model in published_names():
        return json.loads(_configs().joinpath(f"{model}.json").read_text(encoding="utf-8"))
    file = Path(model).expanduser()
    if file.suffix != ".json":
        return read_config(find_model(model))
    fields = read_json(file)
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must hold a JSON object, as a {CONFIG_FILE} does.")
    return fields


def _configs() -> Any:
    return resources.files("mtp_jax.plan").joinpath("configs")
