"""Recurrences of transformers' models, with their states in reach."""
