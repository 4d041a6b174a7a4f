"""Chips and slices of them by name: what their makers state, and how many devices jax would see."""

import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mtp_jax.core.errors import ConfigError

_TABLE = "chips.toml"
_GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One line of `chips.toml`; see there for units and sources. Figures are of the chip, not of a device of it."""

    name: str
    platform: str
    hbm_gib: float
    hbm_gb_s: float
    matrix_tflop_s: float
    link_gb_s: float
    dimensions: int
    kernel: str
    source: str
    network_gb_s: float | None = None
    chips_per_host: int | None = None
    devices_per_chip: int = 1

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device."""
        return int(self.hbm_gib * _GIB / self.devices_per_chip)

    @property
    def hbm_bytes_s(self) -> float:
        """Memory bandwidth of one device."""
        return self.hbm_gb_s * 1e9 / self.devices_per_chip

    @property
    def flop_s(self) -> float:
        """Bfloat16 products of one device."""
        return self.matrix_tflop_s * 1e12 / self.devices_per_chip

    @property
    def send_bytes_s(self) -> float:
        """What one device can send over all its links together: half of both directions."""
        return self.link_gb_s * 1e9 / 2 / self.devices_per_chip


@dataclass(frozen=True)
class Slice:
    """Chips joined by their links: `name` as it was asked for, such as "v5p:2x2x1" or "h200:8"."""

    name: str
    chip: Chip
    num_chips: int

    @property
    def num_devices(self) -> int:
        """Devices that jax sees."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def devices_per_host(self) -> int | None:
        """Devices that the links join, where they end at the host; None where they reach every chip of the slice."""
        return self.chip.chips_per_host


@cache
def chips() -> dict[str, Chip]:
    """Every chip that a plan can be made for.

    >>> chips()["v5e"].hbm_gb_s
    819
    """
    table = tomllib.loads(resources.files("mtp_jax.plan").joinpath(_TABLE).read_text(encoding="utf-8"))
    return {name: Chip(name, **facts) for name, facts in table.items()}


def slice_named(name: str) -> Slice:
    """The slice that a name means: a chip, a colon, and the topology (TPU) or the number of chips (GPU).

    >>> slice_named("tpu7x:2x2x1").num_devices
    8
    >>> slice_named("v5p:2x2")
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: topology is 'v5p:2x2'; a v5p has 3 dimensions, such as 'v5p:2x2x1'.
    >>> slice_named("v9:2x2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: topology is 'v9:2x2'; its chip must be one of 'v5e', 'v5p', ...
    """
    chip_name, _, sizes = name.partition(":")
    if chip_name not in chips():
        allowed = ", ".join(map(repr, chips()))
        raise ConfigError(f"topology is {name!r}; its chip must be one of {allowed}, such as 'v5p:2x2x1' or 'h200:8'.")
    chip = chips()[chip_name]
    wanted = max(chip.dimensions, 1)
    if not re.fullmatch("x".join([r"[1-9]\d*"] * wanted), sizes):
        example = f"{chip_name}:" + ("8" if chip.dimensions == 0 else "x".join("221"[:wanted]))
        what = "is a number of chips" if chip.dimensions == 0 else f"has {wanted} dimensions"
        raise ConfigError(f"topology is {name!r}; a {chip_name} {what}, such as {example!r}.")
    return Slice(name, chip, math.prod(map(int, sizes.split("x"))))
