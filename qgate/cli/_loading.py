"""Modules that a command loads only when it runs, so that `qgate --help` answers at once."""

from qgate.loading import LateModule

__all__ = ["LateModule"]
