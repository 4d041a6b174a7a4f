"""Pallas kernels for decoding, one folder per operation. Needs jax only; usable without the engine."""
