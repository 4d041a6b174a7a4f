"""What is said when a checkpoint cannot be used."""

import numpy as np

from mtp_jax.core.errors import ConfigError


class CheckpointError(ConfigError):
    """A model's files are missing, damaged or contradict its config; the message names the file and the tensor."""


def odd_number(array: np.ndarray) -> str | None:
    """What of an array is no finite number, in a word; None if all are.

    >>> odd_number(np.array([1.0, np.inf])), odd_number(np.array([1.0]))
    ('an infinity', None)
    """
    if np.isfinite(array).all():
        return None
    return "NaN" if np.isnan(array).any() else "an infinity"
