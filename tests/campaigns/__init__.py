"""Faults on purpose, many of them: `python -m tests.campaigns --help`, figures in RESULTS.md."""
