"""What formats do to tensors: sweeps over scales, underflow."""

from qgate.analysis.sweeps.sweeping import Sweep, sweep
from qgate.analysis.underflow import Range, Watch, range, watch_underflow

__all__ = ["Range", "Sweep", "Watch", "range", "sweep", "watch_underflow"]
