"""Run a function over many items: in this process, in several, or on a Ray cluster."""

from qgate.engine.running import Reduction, map_items, merged, started
from qgate.engine.sharing import PackedValue
from qgate.engine.workers import Failure, Workers, workers_of

__all__ = [
    "Failure",
    "PackedValue",
    "Reduction",
    "Workers",
    "map_items",
    "merged",
    "started",
    "workers_of",
]
