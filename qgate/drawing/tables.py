"""The tables of an analysis as CSV, line by line; no cell is a formula to a spreadsheet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from qgate.summaries.reading import figure_of, flushed, ratio_db, ratios_db
from qgate.summaries.record import DumpAnalysis, TensorSummary
from qgate.text import csv_lines

Row = Mapping[str, object]
_IDENTITY = (
    "title", "order", "module", "layer_type", "layer", "operation", "phase", "component", "name",
    "quant_type", "rank", "iteration", "sample", "micro_batch", "call",
)  # fmt: skip
_FIGURES = (
    "elements", "counted", "source", "counted_as", "nan", "posinf", "neginf", "zeros", "min", "max",
    "amax", "amin", "mean", "std", "rms", "skew", "kurtosis",
)  # fmt: skip
_TENSOR = (
    "title", "order", "module", "layer_type", "layer", "operation", "name", "quant_type", "rank",
)  # fmt: skip
_TENSORS = (
    *_IDENTITY, "shape", "dtype", *_FIGURES, "exponents", "patterns", "channel", "channel_amax",
)  # fmt: skip
_FORMATS = (
    *_TENSOR, "format", "upper", "lower", "flushed", "underflow", "beyond_range",
    "saturated_error_share", "of", "sqnr_db", "fitted_sqnr_db", "best_sqnr_db",
    "best_sqnr_db_without_massive", "exact",
)  # fmt: skip
_GROUPS = (
    "layer_type", "operation", "name", "quant_type", "dtype", "tensors", *_FIGURES, "best_fit",
    "exponents", "patterns",
)  # fmt: skip


def tensors_csv(analysis: DumpAnalysis) -> Iterator[str]:
    """Write one row per tensor."""
    return csv_lines(_TENSORS, map(_tensor_row, analysis["tensors"]))


def _tensor_row(tensor: TensorSummary) -> Row:
    channels = tensor.get("channels")
    largest = channels["largest"][0] if channels and channels["largest"] else (None, None)
    fields: Row = tensor
    return {
        **{name: fields.get(name) for name in ("dtype", *_IDENTITY, *_FIGURES)},
        **(tensor.get("usage") or {}),
        "shape": "x".join(str(size) for size in tensor.get("shape") or ()),
        "channel": largest[0],
        "channel_amax": largest[1],
    }


def formats_csv(analysis: DumpAnalysis) -> Iterator[str]:
    """Write one row per tensor and format; an SQNR without noise is empty and `exact` true."""
    return csv_lines(_FORMATS, _format_rows(analysis))


def _format_rows(analysis: DumpAnalysis) -> Iterator[Row]:
    for tensor in analysis["tensors"]:
        for name, outcome in (tensor.get("formats") or {}).items():
            plain = ratio_db(outcome["signal"], outcome["noise"])
            best, calm = ratios_db(outcome)
            yield {
                **{name: tensor.get(name) for name in _TENSOR},
                **outcome,
                "flushed": flushed(outcome),
                "format": name,
                "sqnr_db": plain,
                "fitted_sqnr_db": ratio_db(
                    figure_of(outcome, "fitted_signal"), figure_of(outcome, "fitted_noise")
                ),
                "best_sqnr_db": best,
                "best_sqnr_db_without_massive": calm,
                "exact": plain == math.inf,
            }


def groups_csv(analysis: DumpAnalysis) -> Iterator[str]:
    """Write one row per group of pooled tensors."""
    rows: Iterator[Row] = (
        {**group, **(group.get("usage") or {}), "best_fit": group.get("best")}
        for group in analysis["groups"]
    )
    return csv_lines(_GROUPS, rows)


TABLES = {"tensors.csv": tensors_csv, "formats.csv": formats_csv, "groups.csv": groups_csv}
