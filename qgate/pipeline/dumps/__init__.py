"""Dumps of runs: collected, compared, analyzed."""
