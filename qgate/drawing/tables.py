"""The tables of an analysis as CSV, line by line: no cell is a formula to whoever opens it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qgate.summaries.reading import flushed, ratio_db, ratios_db
from qgate.summaries.record import DumpAnalysis, GroupPortrait, TensorPortrait
from qgate.text import csv_lines

_IDENTITY = (
    "title", "order", "module", "layer_type", "layer", "operation", "phase", "component", "name",
    "quant_type", "rank", "iteration", "sample", "micro_batch", "call",
)  # fmt: skip
_FIGURES = (
    "elements", "counted", "source", "counted_as", "nan", "posinf", "neginf", "zeros", "min", "max",
    "amax", "amin", "mean", "std", "rms", "skew", "kurtosis",
)  # fmt: skip
_WHOSE = (
    "title", "order", "module", "layer_type", "layer", "operation", "name", "quant_type", "rank",
)  # fmt: skip
_SHARES = (
    "upper", "lower", "flushed", "underflow", "beyond_range", "saturated_error_share",
)  # fmt: skip


def tensors_csv(analysis: DumpAnalysis) -> Iterator[str]:
    """One row per tensor."""
    columns = [
        *_IDENTITY,
        "shape",
        "dtype",
        *_FIGURES,
        "exponents",
        "patterns",
        "channel",
        "channel_amax",
    ]
    return csv_lines(columns, map(_tensor_row, analysis["tensors"]))


def _tensor_row(tensor: TensorPortrait) -> dict[str, Any]:
    channels: Mapping[str, Any] = tensor.get("channels") or {}
    largest = channels.get("largest") or [(None, None)]
    told: Mapping[str, Any] = tensor
    return {
        **{name: told.get(name) for name in ("dtype", *_IDENTITY, *_FIGURES)},
        **(tensor.get("usage") or {}),
        "shape": "x".join(str(size) for size in tensor.get("shape") or ()),
        "channel": largest[0][0],
        "channel_amax": largest[0][1],
    }


def formats_csv(analysis: DumpAnalysis) -> Iterator[str]:
    """One row per tensor and format; an SQNR without noise is empty, and `exact` says so."""
    columns = [
        *_WHOSE, "format", *_SHARES, "of", "sqnr_db",
        "fitted_sqnr_db", "best_sqnr_db", "best_sqnr_db_without_massive", "exact",
    ]  # fmt: skip
    return csv_lines(columns, _format_rows(analysis))


def _format_rows(analysis: DumpAnalysis) -> Iterable[dict[str, Any]]:
    for tensor in analysis["tensors"]:
        for name, fate in (tensor.get("formats") or {}).items():
            plain = ratio_db(fate["signal"], fate["noise"])
            fitted = math.nan
            if "fitted_signal" in fate and "fitted_noise" in fate:
                fitted = ratio_db(fate["fitted_signal"], fate["fitted_noise"])
            best, rest = ratios_db(fate)
            yield {
                **{name: tensor.get(name) for name in _WHOSE},
                **fate,
                "flushed": flushed(fate),
                "format": name,
                "sqnr_db": plain,
                "fitted_sqnr_db": fitted,
                "best_sqnr_db": best,
                "best_sqnr_db_without_massive": rest,
                "exact": plain == math.inf,
            }


def groups_csv(analysis: DumpAnalysis) -> Iterator[str]:
    """One row per group of tensors that are pooled."""
    columns = [
        "layer_type", "operation", "name", "quant_type", "dtype", "tensors", *_FIGURES, "best_fit",
        "exponents", "patterns",
    ]  # fmt: skip
    return csv_lines(columns, map(_group_row, analysis["groups"]))


def _group_row(group: GroupPortrait) -> dict[str, Any]:
    return {**group, **(group.get("usage") or {}), "best_fit": group.get("best")}


TABLES = {"tensors.csv": tensors_csv, "formats.csv": formats_csv, "groups.csv": groups_csv}
