"""Who computes: a function over many items, in this process, in several, or on a Ray cluster."""

from qgate.engine.running import Merged, merged, outcomes
from qgate.engine.sharing import Sent
from qgate.engine.workers import Failure, Workers, workers_of

__all__ = ["Failure", "Merged", "Sent", "Workers", "merged", "outcomes", "workers_of"]
