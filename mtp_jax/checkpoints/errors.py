"""What is said when a checkpoint cannot be used."""

from mtp_jax.core.errors import ConfigError


class CheckpointError(ConfigError):
    """A model's files are missing, damaged or contradict its config; the message names the file and the tensor."""
