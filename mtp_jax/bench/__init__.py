"""Measurements of the whole engine: `compare` (drafting against plain decoding) and `decode` (every draft length)."""
