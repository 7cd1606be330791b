"""The metrics: one table of every number that qgate computes, compares, stores or shows.

Adding one is one literal: `METRICS.add(Metric(...))`. It then stands in sweeps, comparisons, gates,
CSV files and pages, which read its fields and never its name.
"""

from qgate.metrics import error_metrics, gate_metrics
from qgate.metrics._table import METRICS, PARTS, Direction, Metric, MetricTable, Part, Source, Sums

__all__ = [
    "METRICS",
    "PARTS",
    "Direction",
    "Metric",
    "MetricTable",
    "Part",
    "Source",
    "Sums",
    "error_metrics",
    "gate_metrics",
]
