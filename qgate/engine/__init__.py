"""Who computes: a function over many items, in this process or in several."""

from qgate.engine.running import Failure, outcomes

__all__ = ["Failure", "outcomes"]
