"""Statistics that merge: exact value counts of one tensor, errors between two."""

from qgate.stats._bits import all_bf16, serial
from qgate.stats.blocks import BlockCounts, block_counts
from qgate.stats.direct_values import Values
from qgate.stats.error_stats import ErrorStats, errors
from qgate.stats.metrics import METRICS, ErrorSums, Metric
from qgate.stats.value_counts import Counts, counts

__all__ = [
    "METRICS",
    "BlockCounts",
    "Counts",
    "ErrorStats",
    "ErrorSums",
    "Metric",
    "Values",
    "all_bf16",
    "block_counts",
    "counts",
    "errors",
    "serial",
]
