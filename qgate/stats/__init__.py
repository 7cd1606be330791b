"""Statistics that merge: exact value counts of one tensor, errors between two."""

from qgate.metrics import METRICS, Metric
from qgate.stats._sums import ErrorSums
from qgate.stats.bits import all_bf16, serial
from qgate.stats.blocks import BlockCounts, block_counts
from qgate.stats.direct_values import Values
from qgate.stats.error_stats import AxisErrors, Element, ErrorStats, NonFinite, errors
from qgate.stats.massive import massive_beyond
from qgate.stats.value_counts import Counts, counts

__all__ = [
    "METRICS",
    "AxisErrors",
    "BlockCounts",
    "Counts",
    "Element",
    "ErrorStats",
    "ErrorSums",
    "Metric",
    "NonFinite",
    "Values",
    "all_bf16",
    "block_counts",
    "counts",
    "errors",
    "massive_beyond",
    "serial",
]
