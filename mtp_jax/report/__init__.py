"""A page about the results of a batch: how their tokens came, and what drafting brought."""

from mtp_jax.report.page import page as page
from mtp_jax.report.reading import Findings as Findings
from mtp_jax.report.reading import read_results as read_results
