"""Quantized checkpoints beside what they declare and the checkpoints that they were made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.checkpoints.comparison import compare
    from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord, WeightRecord

__all__ = ["CheckpointFinding", "CheckpointRecord", "WeightRecord", "compare"]

# Pages and texts of a record load no torch, which comparing needs.
__getattr__ = lazy(
    __name__,
    {
        "comparison": "compare",
        "record": "CheckpointFinding CheckpointRecord WeightRecord",
    },
)


def __dir__() -> list[str]:
    return __all__
