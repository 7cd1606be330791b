"""Modes that quantize what attention reads: the cache of keys and values, and its products."""
