"""The tables of a record of activations, and their files: CSV and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.text import as_csv

Row = dict[str, object]
# Tables of layers, with the columns that distinguish rows of one layer and begin the names of its
# statistics. Tokens and channels have tables of their own.
_BY = {
    "layers": (),
    "magnitude": ("reduced",),
    "outliers": (),
    "formats": ("format",),
    "smoothing": ("format",),
    "sensitivity": ("format",),
}
_NAMES = ("layers", "magnitude", "outliers", "tokens", "channels", "ranges", "formats", "smoothing")
_COLUMNS = ("layer", "role", "statistic", "value")
_SHARES = ("upper", "lower", "underflow", "beyond_range", "saturated_error_share", "of")
_FIGURES = ("min", "max", "amax", "amin", "mean", "std", "rms", "skew", "kurtosis", "zeros")


def tables_of(record: ActivationsRecord) -> dict[str, list[Row]]:
    """Return rows by table; a row has no entry for a number that does not exist."""
    rows_by_table: dict[str, list[Row]] = {name: [] for name in _NAMES}
    for layer in record["layers"]:
        for name, rows in _of_layer(layer).items():
            start = {"module": layer["module"], "role": layer["role"]}
            rows_by_table[name] += [start | row for row in rows]
    rows_by_table["sensitivity"] = [dict(layer) for layer in record["sensitivity"]]
    rows_by_table["proposals"] = [
        _without(proposal, "keep", "curve")
        | {"kept": len(proposal["keep"]), "keep": " ".join(proposal["keep"])}
        for proposal in record["proposals"]
    ]
    return rows_by_table


def _without(record: Mapping[str, Any], *names: str) -> Row:
    return {k: v for k, v in record.items() if k not in names}


def _picked(record: Mapping[str, Any], *names: str) -> Row:
    return {k: record[k] for k in names if k in record}


def _of_layer(layer: LayerActivations) -> dict[str, list[Row]]:
    """Return the rows of a layer by table, in the order of the tables."""
    rounding, summary = layer.get("rounding", 0.0), layer["portrait"]
    row = _picked(layer, "layer", "kind", "width", "samples", "calls", "tokens", "coverage")
    row |= _picked(summary, "elements", "nan", "posinf", "neginf")
    row |= _picked(summary, *_FIGURES)
    row |= {f"q{p}": value for p, value in summary.get("quantiles", {}).items()}
    row |= {"quantile_error": rounding}
    row |= {f"massive_{name}": value for name, value in layer.get("massive", {}).items()}
    rows_by_table: dict[str, list[Row]] = {
        "layers": [row],
        "magnitude": [
            {
                "reduced": reduced,
                **{f"top{k}": value for k, value in enumerate(entry["top"], 1)},
                "median": entry["median"],
                "median_error": rounding if reduced == "all" else 0.0,
                **{f"low{k}": value for k, value in enumerate(entry["low"], 1)},
                "most": entry["most"],
            }
            for reduced, entry in layer.get("magnitude", {}).items()
        ],
    }
    if "outliers" in layer:
        outliers = layer["outliers"]
        row = {"threshold": outliers["threshold"], "count": sum(outliers["counts"])}
        row |= _picked(outliers, "mean_count", "undefined", "max_over_rms", "channel_ratio",
                       "token_ratio")  # fmt: skip
        row |= {
            "channels": len(outliers["channels"]),
            "systematic": sum(1 for entry in outliers["channels"] if entry["systematic"]),
            "massive": len(outliers["massive"]),
        }
        rows_by_table["outliers"] = [row]
        rows_by_table["tokens"] = [{"kind": "token", **token} for token in outliers["tokens"]]
        rows_by_table["tokens"] += [{"kind": "massive", **token} for token in outliers["massive"]]
        rows_by_table["channels"] = [dict(entry) for entry in outliers["channels"]]
    if "ranges" in layer:
        ranges = layer["ranges"]
        errors = dict.fromkeys(ranges.get("exact", ()), 0.0)
        rows_by_table["ranges"] = [
            {"percentile": p, "channel": c, "value": v, "error": errors.get(p, ranges["error"])}
            for p, values in ranges["percentiles"].items()
            for c, v in enumerate(values)
        ]
    rows_by_table["formats"] = [
        {"format": name, **_errors(outcome), **{k: v for k, v in outcome.items() if k in _SHARES}}
        | {"flushed": outcome["flushed"]}
        for name, outcome in summary.get("formats", {}).items()
    ]
    rows_by_table["smoothing"] = [_without(entry, "curve") for entry in layer.get("smoothing", [])]
    return rows_by_table


def _errors(outcome: Mapping[str, Any]) -> Row:
    """Return the SQNR of a cast and with a fitted scale, each with and without massive elements.

    An infinite one is absent, and `exact` is true instead.
    """
    row: Row = {}
    for kind in ("", "fitted_"):
        for signal, noise, ending in (
            (f"{kind}signal", f"{kind}noise", ""),
            ("rest_signal", f"{kind}rest_noise", "_without_massive"),
        ):
            if outcome.get(signal, 0) > 0 and outcome.get(noise, 0) > 0:
                row[f"{kind}sqnr_db{ending}"] = 10 * math.log10(outcome[signal] / outcome[noise])
            if signal in outcome and outcome.get(noise) == 0 and not ending:
                row[f"{kind}exact"] = True
    return row


# Files -------------------------------------------------------------------------------------------


def tables(record: ActivationsRecord) -> dict[str, list[Row]]:
    """Return all tables by the names of their files, with `statistics` in long form."""
    wide = tables_of(record)
    return {"statistics": list(_statistics(wide)), **wide}


def _statistics(wide: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    """Yield a row per layer, role and number."""
    for table, by in _BY.items():
        for row in wide.get(table, ()):
            start = ".".join([table, *(str(row[name]) for name in by if name in row)])
            start = "" if table == "layers" else f"{start}."
            for name, value in row.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and name not in ("layer", *by):
                    role = row.get("role", "output of the model")
                    values = (row["module"], role, f"{start}{name}", value)
                    yield dict(zip(_COLUMNS, values, strict=True))


def csv_files(record: ActivationsRecord) -> dict[str, str]:
    """Return the contents of files by name; a table without rows has no file."""
    return {
        # Rows may have different columns.
        f"{name}.csv": as_csv(list(dict.fromkeys(key for row in rows for key in row)), rows)
        for name, rows in tables(record).items()
        if rows
    }


def as_json(record: ActivationsRecord) -> str:
    """Write the record with its tables, except percentiles of channels, which its layers have."""
    json_tables = {
        name: rows for name, rows in tables(record).items() if name not in ("ranges", "statistics")
    }
    return json.dumps({**record, "tables": json_tables}, allow_nan=False, ensure_ascii=True) + "\n"
