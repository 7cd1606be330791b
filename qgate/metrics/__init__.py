"""The metrics: one table of every number that qgate computes, compares, stores or shows.

Adding one is one literal: `METRICS.add(Metric(...))`. It then stands in sweeps, comparisons, gates,
CSV files and pages, which read its fields and never its name.
"""

from qgate.metrics import error_metrics, gate_metrics
from qgate.metrics._table import (
    METRICS,
    PARTS,
    Direction,
    ErrorSumsLike,
    Metric,
    MetricTable,
    Source,
    TensorPart,
    sample_number,
    sample_part,
)

__all__ = [
    "METRICS",
    "PARTS",
    "Direction",
    "ErrorSumsLike",
    "Metric",
    "MetricTable",
    "Source",
    "TensorPart",
    "error_metrics",
    "gate_metrics",
    "sample_number",
    "sample_part",
]
