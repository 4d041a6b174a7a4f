"""The ways this project says no.

Bad input, a limit of a variant (`NotImplementedError`), a device or process that failed, or a bug of ours.
"""

from collections.abc import Sequence

_LONGEST_VALUE = 80


def short(value: object) -> str:
    """A value as a sentence can hold it.

    >>> short("a" * 100) == "'" + "a" * 76 + "..."
    True
    """
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


class ConfigError(ValueError):
    """The configuration, model or request cannot be honoured; the message names the thing and what would be allowed."""


class EngineFailed(RuntimeError):
    """A step failed on a device, or another process of the mesh is gone: the engine cannot go on.

    `outputs` holds what was finished before, where whoever raised it knows.
    """

    def __init__(self, message: str, outputs: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.outputs: Sequence[object] = outputs


class InvariantError(RuntimeError):
    """A rule of the engine's own bookkeeping was broken. A bug of ours: stops the engine and is never caught."""
