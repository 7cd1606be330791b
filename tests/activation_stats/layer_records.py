"""Statistics and records of one layer that gets some tensors, one call per sample."""

from __future__ import annotations

import json

from torch import Tensor

from qgate.activation_stats.layer_stats import LayerRequest, LayerStats
from qgate.activation_stats.record import LayerActivations


def stats_of(xs: list[Tensor], request: LayerRequest | None = None) -> LayerStats:
    stats = LayerStats("m", "input", request)
    for k, x in enumerate(xs):
        stats.update(x, k)
    return stats


def record_of(xs: list[Tensor], request: LayerRequest | None = None) -> LayerActivations:
    record = stats_of(xs, request).record(0, "linear", len(xs))
    json.dumps(record, allow_nan=False)
    return record
