"""`mtp-jax` with a toy behind `--model`, for scripts that start it: `python -m tests.deploy.toy_cli run-batch ...`.

`FAIL_ONCE` names a file; the first process with `--process-id 1` that finds it missing makes it and dies.
"""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import jax

from mtp_jax.checkpoints import LoadedModel
from mtp_jax.cli.main import main
from mtp_jax.core.config import MeshConfig
from mtp_jax.testing.toy_family import ToyFamily


def load(model: str, *, dtype: str | None, mesh: MeshConfig | None) -> LoadedModel:
    family = ToyFamily()
    return LoadedModel(family, family.init_weights(jax.random.key(0), None), Path("nowhere"), dtype or "float32")


if __name__ == "__main__":
    mark = Path(os.environ["FAIL_ONCE"])
    if os.environ.get("SLURM_PROCID", sys.argv[-1]) == "1" and not mark.exists():
        mark.touch()
        sys.exit(1)
    with patch("mtp_jax.cli.start.load_model", load):
        sys.exit(main())
