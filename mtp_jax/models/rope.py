"""Rotary position embedding, computed from positions: no table, so no longest length is built in.

Scaling types: "default", "linear" (positions divided by a factor), "yarn" (Peng et al., arXiv 2309.00071, with the
`mscale` fields that DeepSeek added) and "llama3" (Llama 3.1's).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.hf_config import HfConfig, positive_number


@dataclass(frozen=True)
class YarnScaling:
    """Slow frequencies are divided by `factor`, fast ones are kept, and a linear ramp joins the two.

    Slow: fewer than `beta_slow` turns over the original length; fast: more than `beta_fast`. `truncate` rounds the ends
    of the ramp outwards to whole channels.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The scaled frequencies."""
        half = len(inverse_frequencies)

        def channel_of(turns: float) -> float:
            length = self.original_max_position_embeddings
            return 2 * half * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel_of(self.beta_fast), channel_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        width = high - low if high != low else 0.001
        stretched = np.clip((np.arange(half) - low) / width, 0, 1)
        return inverse_frequencies * (1 - stretched + stretched / self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: slow frequencies are divided by `factor`, fast ones are kept, and in between the two are mixed.

    Turns over the original length decide: slow below `low_freq_factor`, fast above `high_freq_factor`, and the share of
    the kept frequency grows linearly with the turns from the one to the other.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def scale(self, inverse_frequencies: np.ndarray, theta: float) -> np.ndarray:  # noqa: ARG002  as YaRN's
        """The scaled frequencies."""
        turns = self.original_max_position_embeddings * inverse_frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return inverse_frequencies * (kept + (1 - kept) / self.factor)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature as a factor on queries and keys: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `num_channels` channels of a head, the two halves of a pair `num_channels / 2` apart.

    `amplitude` multiplies cosine and sine (YaRN). Checkpoints whose pairs are neighbours ("interleaved") are reordered
    when they are loaded: see `pair_order`.
    """

    num_channels: int
    theta: float
    linear_factor: float = 1.0
    scaling: YarnScaling | Llama3Scaling | None = None
    amplitude: float = 1.0

    def inverse_frequencies(self) -> np.ndarray:
        """Radians per position of each channel pair, float64 [num_channels / 2]."""
        exponents = np.arange(0, self.num_channels, 2) / self.num_channels
        inverse_frequencies = self.theta**-exponents / self.linear_factor
        return inverse_frequencies if self.scaling is None else self.scaling.scale(inverse_frequencies, self.theta)

    def rotation(self, positions_BW: Int[Array, "B W"]) -> "Rotation":
        """Cosine and sine for these positions; computed once and used by every layer."""
        frequencies = jnp.asarray(self.inverse_frequencies(), jnp.float32)
        angles_BWC = positions_BW.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
        return Rotation(jnp.cos(angles_BWC) * self.amplitude, jnp.sin(angles_BWC) * self.amplitude)


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of each position and channel pair."""

    cos_BWC: Float[Array, "B W half"]
    sin_BWC: Float[Array, "B W half"]

    def apply(self, x_BWHC: Float[Array, "B W H C"]) -> Float[Array, "B W H C"]:
        """Rotates the leading `2 * half` channels in float32; the others pass."""
        half = self.cos_BWC.shape[-1]
        cos, sin = self.cos_BWC[:, :, None, :], self.sin_BWC[:, :, None, :]
        first = x_BWHC[..., :half].astype(jnp.float32)
        second = x_BWHC[..., half : 2 * half].astype(jnp.float32)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([rotated.astype(x_BWHC.dtype), x_BWHC[..., 2 * half :]], axis=-1)


def pair_order(num_channels: int, layout: Literal["interleaved", "halves"]) -> np.ndarray:
    """Order in which a checkpoint's rotary channels are taken so that pairs end up `num_channels / 2` apart.

    Queries and keys are taken in the same order, so their products, and with them the model, stay the same.

    >>> pair_order(6, "interleaved").tolist()
    [0, 2, 4, 1, 3, 5]
    """
    channels = np.arange(num_channels)
    return channels if layout == "halves" else np.concatenate([channels[0::2], channels[1::2]])


_FIELDS_OF_KIND = {
    "default": (),
    "linear": ("factor", "mscale_all_dim"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_COMMON_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rotary_channels(config: HfConfig, head_channels: int, *, default_fraction: float) -> int:
    """How many channels of a head rotate, by `partial_rotary_factor`."""
    fraction = _stated_once(config, _rope_fields(config), "partial_rotary_factor", default_fraction)
    fraction = positive_number(fraction, "config field 'partial_rotary_factor'")
    num_channels = int(head_channels * fraction)
    if num_channels % 2 or not 0 < num_channels <= head_channels:
        raise ConfigError(
            f"config field 'partial_rotary_factor' is {fraction}, which rotates {num_channels} of a head's "
            f"{head_channels} channels; it must be an even number of them, at least 2."
        )
    return num_channels


def read_rope(config: HfConfig, num_channels: int) -> tuple[Rope, float]:
    """The rotation that a config describes, and `mscale_all_dim`'s factor on each side of the attention product.

    Fields absent from the config take the values that the released code gives them.
    """
    fields = _rope_fields(config)
    theta = positive_number(_stated_once(config, fields, "rope_theta", 10000.0), "config field 'rope_theta'")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FIELDS_OF_KIND:
        raise ConfigError(f"config field 'rope_type' is {kind!r}; allowed: {', '.join(map(repr, _FIELDS_OF_KIND))}.")
    unknown = sorted(fields.keys() - {*_FIELDS_OF_KIND[kind], *_COMMON_FIELDS})
    if unknown:
        raise ConfigError(
            f"rope field {unknown[0]!r} is {fields[unknown[0]]!r}, which rope type {kind!r} does not have; "
            f"leave it out."
        )

    def number(name: str, default: float | None = None) -> float:
        return positive_number(fields.get(name, default), f"rope field {name!r}")

    if kind == "default":
        return Rope(num_channels, theta), 1.0
    max_len = config.integer("max_position_embeddings")
    original_len = _stated_once(config, fields, "original_max_position_embeddings", max_len)
    original_len = int(positive_number(original_len, "rope field 'original_max_position_embeddings'"))
    factor = number("factor", max_len / original_len if kind == "yarn" else None)
    if kind == "llama3":
        llama3 = Llama3Scaling(factor, original_len, number("low_freq_factor"), number("high_freq_factor"))
        if llama3.high_freq_factor <= llama3.low_freq_factor:
            raise ConfigError(
                f"rope field 'high_freq_factor' is {llama3.high_freq_factor} and 'low_freq_factor' is "
                f"{llama3.low_freq_factor}; both count turns, and the higher must be above the lower."
            )
        return Rope(num_channels, theta, scaling=llama3), 1.0
    is_tempered = bool(fields.get("mscale_all_dim"))  # zero switches it off
    mscale = yarn_mscale(factor, number("mscale_all_dim")) if is_tempered else 1.0
    if kind == "linear":
        return Rope(num_channels, theta, linear_factor=factor), mscale
    amplitude = yarn_mscale(factor, 1.0)
    if is_tempered and fields.get("mscale"):
        amplitude = yarn_mscale(factor, number("mscale")) / mscale
    if theta <= 1:
        raise ConfigError(f"config field 'rope_theta' is {theta}; rope type 'yarn' needs it above 1.")
    yarn = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original_len,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(fields.get("truncate", True)),
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise ConfigError(
            f"rope field 'beta_fast' is {yarn.beta_fast} and 'beta_slow' is {yarn.beta_slow}; "
            "beta_fast counts turns of the faster channels, so it must be at least beta_slow."
        )
    return Rope(num_channels, theta, scaling=yarn, amplitude=number("attention_factor", amplitude)), mscale


def _stated_once(config: HfConfig, rope_fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field that may stand at the top of the config or among the rope fields; refused where the two differ."""
    above, among = config.get(name), rope_fields.get(name)
    if above is not None and among is not None and above != among:
        raise ConfigError(
            f"config field {name!r} is {above!r}, and {among!r} among the rope fields; give one of them, or the same."
        )
    stated = among if above is None else above
    return default if stated is None else stated


def _rope_fields(config: HfConfig) -> dict[str, Any]:
    """`rope_parameters` (new layout) or `rope_scaling` (old), without null fields."""
    found = {name: config.get(name, {}) for name in ("rope_parameters", "rope_scaling")}
    for name, fields in found.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(f"config field {name!r} is {fields!r}; it must be a mapping of rope fields or null.")
    new, old = ({key: value for key, value in fields.items() if value is not None} for fields in found.values())
    if new and old and new != old:
        raise ConfigError(f"config fields 'rope_parameters' {new} and 'rope_scaling' {old} differ; give one of them.")
    return new or old
