"""The command line, `mtp-jax`: one file per command."""

from mtp_jax.cli.main import main as main
