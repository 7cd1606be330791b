"""Faults of quantizers and kernels: their words, and the traces that they leave."""
