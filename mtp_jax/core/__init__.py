"""Frozen data and configuration that every other package may import."""
