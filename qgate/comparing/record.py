"""The record of a comparison of captured layers, as its file has it."""

from __future__ import annotations

from typing import Any, TypedDict

LayerComparison = dict[str, Any]
"""One layer: statistics of both sides by `fp_` and `mode_`, of their differences by `diff_`, and
metrics by name; null where there is no number, and `reasons` says why."""


class AverageErrors(TypedDict):
    """Averages over layers, unweighted, and the worst layer, which an average hides."""

    avg_mse: float | None
    avg_mae: float | None
    avg_correlation: float | None
    worst_layer: str | None
    worst_relative_mse: float | None
    reasons: dict[str, str]


class ComparisonRecord(TypedDict):
    """A captured mode against its reference.

    reference, reference_mode  the mode, and the beginning of its file names
    made_on                    machine and versions of both sides
    nonfinite_casts            values that were not finite and became integers on the way
    """

    qgate: str
    version: int
    timestamp: str
    reference: str
    reference_mode: str
    compared_mode: str
    output_dir: str
    model: str
    basis: str
    weights: str
    inputs: str
    samples: int
    made_on: dict[str, str]
    percentile_error: float
    layers: dict[str, LayerComparison]
    nonfinite_casts: int
    summary: AverageErrors
