"""The table of a seam: its variants by name, and one sentence for a name that is not in it."""

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from mtp_jax.core.errors import ConfigError

Name = TypeVar("Name")
Variant = TypeVar("Variant")


class Variants(dict[Name, Variant]):
    """A dict of variants that refuses an unknown name with a sentence, in `option`'s words.

    >>> Variants("policy", {"fixed": 1, "goodput": 2})["best"]
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: policy is 'best'; it must be one of 'fixed', 'goodput'.
    """

    def __init__(self, option: str, variants: Mapping[Name, Variant]) -> None:
        super().__init__(variants)
        self.option = option

    def __missing__(self, name: object) -> NoReturn:
        raise ConfigError(f"{self.option} is {name!r}; it must be one of {', '.join(map(repr, self))}.")
