"""Recurrences of transformers' models with their states in reach: Mamba-2, delta rule, convolution."""
