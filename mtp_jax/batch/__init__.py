"""Batch inference: a file of requests in, one result line for each of its lines out, whatever happens meanwhile."""

from mtp_jax.batch.run import run_batch as run_batch
from mtp_jax.batch.summary import Summary as Summary
