"""Collect what flows through a model while it trains or infers, without a change to either.

`Collector` is what `qgate.collect` makes. The hooks and the reading of tensors run in the model's
own thread and are kept short; figures and files are made in a thread of their own.
"""

from qgate.collecting.collector import Collector, is_collecting
from qgate.collecting.settings import Wanted
from qgate.collecting.watching import FirstModel

__all__ = ["Collector", "FirstModel", "Wanted", "is_collecting"]
