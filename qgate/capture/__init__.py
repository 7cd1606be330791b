"""Captures of the tensors at the sites of a model, and errors between two runs."""

from qgate.capture.comparing import compare, compare_runs
from qgate.capture.running import Capture, pick_sites, run

__all__ = ["Capture", "compare", "compare_runs", "pick_sites", "run"]
