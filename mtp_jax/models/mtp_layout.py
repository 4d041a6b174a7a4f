"""How checkpoints write MTP layers down, and how many they have: names, numbering and the order of their two inputs."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.hf_config import NUM_MTP_LAYERS_NAMES, HfConfig


@dataclass(frozen=True)
class MtpLayout:
    """Tensor names of MTP layers, and whether `join` takes the hidden state before the embedding.

    `continues_layers`: MTP layer d is number `num_layers + d` of `folder`, else number d.
    `has_copies`: each layer may repeat the embedding and the head.
    """

    folder: str
    continues_layers: bool
    embedding_norm: str
    hidden_norm: str
    join: str
    head_norm: str
    hidden_first: bool
    has_copies: bool

    def first_number(self, num_layers: int) -> int:
        """The number of the first MTP layer after `num_layers` target layers."""
        return num_layers if self.continues_layers else 0

    def prefix(self, num_layers: int, depth: int) -> str:
        """What the names of MTP layer `depth` start with.

        >>> DEEPSEEK_MTP.prefix(61, 0), MIMO_MTP.prefix(36, 0)
        ('model.layers.61', 'model.mtp_layers.0')
        """
        return f"{self.folder}.{self.first_number(num_layers) + depth}"


DEEPSEEK_MTP = MtpLayout(
    folder="model.layers",
    continues_layers=True,
    embedding_norm="enorm",
    hidden_norm="hnorm",
    join="eh_proj",
    head_norm="shared_head.norm",
    hidden_first=False,
    has_copies=True,
)
MIMO_MTP = MtpLayout(
    folder="model.mtp_layers",
    continues_layers=False,
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    join="input_proj",
    head_norm="final_layernorm",
    hidden_first=True,
    has_copies=False,
)


def num_mtp_layers(config: HfConfig, layout: MtpLayout, num_layers: int, tensor_names: Collection[str] | None) -> int:
    """MTP layers by the config and by the checkpoint; a `ConfigError` where the two disagree.

    The config says it under one of three names. In the checkpoint the layers that have a `layout.join` are counted.
    Without tensor names the config is trusted; without a config field the tensors are counted; without both there are
    none.
    """
    stated = {name: config.integer(name, at_least=0) for name in NUM_MTP_LAYERS_NAMES if config.get(name) is not None}
    if len(set(stated.values())) > 1:
        listed = " and ".join(f"{name}={value}" for name, value in stated.items())
        raise ConfigError(f"the config states the number of MTP layers differently: {listed}; they must be equal.")
    by_config = next(iter(stated.values()), None)
    if tensor_names is None:
        return by_config or 0
    join = re.compile(rf"{re.escape(layout.folder)}\.(\d+)\.{re.escape(layout.join)}\.weight")
    found = sorted(int(match[1]) for name in tensor_names if (match := join.fullmatch(name)) is not None)
    first = layout.first_number(num_layers)
    if found != list(range(first, first + len(found))):
        raise ConfigError(
            f"the checkpoint's MTP layers are {found}; after {num_layers} layers they must be numbered from {first} on."
        )
    if by_config is not None and by_config != len(found):
        name = next(iter(stated))
        raise ConfigError(
            f"config field {name!r} is {by_config} but the checkpoint has {len(found)} MTP layers; "
            f"set it to {len(found)} or add the missing tensors."
        )
    return len(found)
