"""Streaming statistics of what flows through one layer."""
