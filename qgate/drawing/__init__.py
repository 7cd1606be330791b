"""Dumps under all analyses: distributions, losses, ranks, and what is shown of them."""
