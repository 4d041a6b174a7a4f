"""What a user's value must be, one sentence for one that is not."""

# pyright: reportUnnecessaryIsInstance=false
# What a user passes need not have the type it is annotated with; these checks are what says so.

from collections.abc import Sequence

from mtp_jax.core.errors import ConfigError


def is_int(value: object) -> bool:
    """An integer that is no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A number that is no truth value; it may be infinite, or none (NaN)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raises `ConfigError` unless the value is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def require_name(option: str, value: object, *, or_none: bool = False) -> None:
    """Raises `ConfigError` unless the value is a string; which names there are, a seam's table knows."""
    if not isinstance(value, str) and not (or_none and value is None):
        raise ConfigError(f"{option} is {value!r}; it must be a name{' or None' if or_none else ''}.")


def require_int(name: str, value: object, low: int, high: int | None) -> None:
    """Raises `ConfigError` unless the value is an integer from `low` to `high` (None: any from `low` on).

    >>> require_int("max_num_seqs", 0, 1, None)
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: max_num_seqs is 0; it must be an integer at least 1.
    """
    if not is_int(value) or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}; it must be an integer {bounds}.")
