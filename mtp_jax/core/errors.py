"""The three ways this project says no. Bad input, a limit of a variant (`NotImplementedError`), or a bug of ours."""


class ConfigError(ValueError):
    """The configuration, model or request cannot be honoured; the message names the thing and what would be allowed."""


class InvariantError(RuntimeError):
    """A rule of the engine's own bookkeeping was broken. A bug of ours: stops the engine and is never caught."""
