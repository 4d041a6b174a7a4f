"""`python -m mtp_jax.cli`, for where the `mtp-jax` script is not on the path."""

import sys

from mtp_jax.cli.main import main

sys.exit(main())
