"""Effects of formats on tensors: sweeps over scales, underflow."""

from qgate.sweeps.compute import Sweep, sweep
from qgate.sweeps.underflow import Range, Watch, range, watch_underflow

__all__ = ["Range", "Sweep", "Watch", "range", "sweep", "watch_underflow"]
