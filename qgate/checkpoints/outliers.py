"""Weights whose error stands out among those of their format."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from qgate.checkpoints.record import CheckpointRecord, WeightRecord

LEAST_DB = 0.3
"""Distance that right exporters' weights of one format stay under."""
SPREADS = 6.0
"""How many median distances from the median stand out."""
_FEWEST = 4


class OutlierWeight(NamedTuple):
    """A weight, its relative error in dB, that of its format's median weight, and the limit.

    limit_db  how far above the usual error one does not stand out
    """

    weight: WeightRecord
    error_db: float
    usual_db: float
    limit_db: float


def find_outliers(record: CheckpointRecord) -> list[OutlierWeight]:
    """Return weights with much more error than others of one format and method, the worst first.

    Those that have a finding are left out.
    """
    subjects = {finding.subject for finding in record.findings}
    alike: dict[tuple[str, str], list[tuple[WeightRecord, float]]] = {}
    for weight in record.weights:
        error = None if weight.figures is None else weight.figures.error
        if error is not None and error > 0:
            entry = weight, 10 * math.log10(error)
            alike.setdefault((weight.format, weight.method), []).append(entry)
    outliers = []
    for entries in alike.values():
        if len(entries) < _FEWEST:
            continue
        usual = median(error for _, error in entries)
        spread = median(abs(error - usual) for _, error in entries)
        limit = max(LEAST_DB, SPREADS * spread)
        outliers += [
            OutlierWeight(weight, error, usual, limit)
            for weight, error in entries
            if error > usual + limit and weight.name not in subjects
        ]
    return sorted(outliers, key=lambda outlier: outlier.usual_db - outlier.error_db)
