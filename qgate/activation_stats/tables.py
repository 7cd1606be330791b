"""The tables of a record of activations, and their files: CSV and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.text import as_csv

Row = dict[str, Any]
_SHARES = ("upper", "lower", "underflow", "beyond_range", "saturated_error_share", "of")
_FIGURES = ("min", "max", "amax", "amin", "mean", "std", "rms", "skew", "kurtosis", "zeros")


def tables_of(record: ActivationsRecord) -> dict[str, list[Row]]:
    """By name; a number that does not exist is absent from its row."""
    made: dict[str, list[Row]] = {
        name: []
        for name in ("layers", "magnitude", "outliers", "tokens", "channels", "ranges", "formats")
    }
    made["smoothing"] = []
    for layer in record["layers"]:
        key: Row = {"module": layer["module"], "role": layer["role"]}
        made["layers"].append(_layer(layer, key))
        for reduced, figures in layer.get("magnitude", {}).items():
            row = {**key, "reduced": reduced}
            error = layer.get("rounding", 0.0) if reduced == "all" else 0.0
            row |= {f"top{k}": value for k, value in enumerate(figures["top"], 1)}
            row |= {"median": figures["median"], "median_error": error}
            row |= {f"low{k}": value for k, value in enumerate(figures["low"], 1)}
            made["magnitude"].append({**row, "most": figures["most"]})
        _add_outliers(made, layer, key)
        for p, values in layer["ranges"]["percentiles"].items() if "ranges" in layer else ():
            exact = p in layer["ranges"].get("exact", ())
            error = 0.0 if exact else layer["ranges"]["error"]
            made["ranges"] += [
                {**key, "percentile": p, "channel": c, "value": v, "error": error}
                for c, v in enumerate(values)
            ]
        for name, fate in layer["portrait"].get("formats", {}).items():
            row = {**key, "format": name, **_errors(fate)}
            shares = {k: v for k, v in fate.items() if k in _SHARES}
            shares["flushed"] = fate.get("flushed", fate.get("flush"))
            made["formats"].append(row | shares)
        for advice in layer.get("smoothing", []):
            plain = {k: v for k, v in advice.items() if k != "curve"}
            made["smoothing"].append({**key, **plain})
    made["sensitivity"] = [dict(each) for each in record["sensitivity"]]
    made["proposals"] = [
        {k: v for k, v in each.items() if k not in ("keep", "curve")}
        | {"kept": len(each["keep"]), "keep": " ".join(each["keep"])}
        for each in record["proposals"]
    ]
    return made


def _layer(layer: LayerActivations, key: Row) -> Row:
    portrait = layer["portrait"]
    row = {**key, "layer": layer["layer"], "kind": layer["kind"], "width": layer["width"]}
    row |= {k: layer[k] for k in ("samples", "calls", "tokens", "coverage")}
    row |= {k: portrait[k] for k in ("elements", "nan", "posinf", "neginf")}
    figures: Mapping[str, Any] = portrait
    row |= {k: figures[k] for k in _FIGURES if k in figures}
    row |= {f"q{p}": value for p, value in portrait.get("quantiles", {}).items()}
    row["quantile_error"] = layer.get("rounding", 0.0)
    if "massive" in layer:
        row |= {f"massive_{name}": value for name, value in layer["massive"].items()}
    return row


def _add_outliers(made: dict[str, list[Row]], layer: LayerActivations, key: Row) -> None:
    if "outliers" not in layer:
        return
    found = layer["outliers"]
    row = {**key, "threshold": found["threshold"], "count": sum(found["counts"])}
    row |= {"mean_count": found["mean_count"], "undefined": found["undefined"]}
    for name in ("max_over_rms", "channel_ratio", "token_ratio"):
        if name in found:
            row[name] = found[name]
    row["channels"] = len(found["channels"])
    row["systematic"] = sum(1 for each in found["channels"] if each["systematic"])
    made["outliers"].append({**row, "massive": len(found["massive"])})
    for kind in ("tokens", "massive"):
        places = found[kind]
        made["tokens"] += [{**key, "kind": kind.removesuffix("s"), **place} for place in places]
    made["channels"] += [{**key, **each} for each in found["channels"]]


def _errors(fate: Mapping[str, Any]) -> Row:
    """SQNR as it is cast and with a fitted scale, each without massive elements too.

    No number where it would be infinite: `exact` says which.
    """
    row: Row = {}
    for kind in ("", "fitted_"):
        for signal, noise, ending in (
            (f"{kind}signal", f"{kind}noise", ""),
            ("rest_signal", f"{kind}rest_noise", "_without_massive"),
        ):
            if signal in fate and noise in fate:
                row |= _db(fate[signal], fate[noise], f"{kind}sqnr_db{ending}")
                if fate[noise] == 0 and not ending:
                    row[f"{kind}exact"] = True
    return row


def _db(signal: float, noise: float, name: str) -> Row:
    return {name: 10 * math.log10(signal / noise)} if signal > 0 and noise > 0 else {}


# Files -------------------------------------------------------------------------------------------

_LONG = ("layer", "role", "statistic", "value")
# What distinguishes rows of one layer in a wide table, and so begins the name of a statistic.
_BY = {
    "magnitude": ("reduced",),
    "formats": ("format",),
    "smoothing": ("format",),
    "sensitivity": ("format",),
}


def tables(record: ActivationsRecord) -> dict[str, list[Row]]:
    """All tables by the names of their files; `statistics` is the long one."""
    wide: dict[str, list[Row]] = {name: list(rows) for name, rows in tables_of(record).items()}
    return {"statistics": list(_statistics(wide)), **wide}


def _statistics(wide: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    """A row per layer, role and number; rows of places and channels have tables of their own."""
    for table in ("layers", "magnitude", "outliers", "formats", "smoothing", "sensitivity"):
        for row in wide.get(table, ()):
            by = _BY.get(table, ())
            start = ".".join([table, *(str(row[name]) for name in by if name in row)])
            start = "" if table == "layers" else f"{start}."
            for name, value in row.items():
                told = isinstance(value, int | float) and not isinstance(value, bool)
                if told and name not in ("layer", *by):
                    yield {
                        "layer": row["module"],
                        "role": row.get("role", "output of the model"),
                        "statistic": f"{start}{name}",
                        "value": value,
                    }


def _columns(rows: Sequence[Row]) -> list[str]:
    """Of rows that may have different ones."""
    return list(dict.fromkeys(name for row in rows for name in row))


def csv_files(record: ActivationsRecord) -> dict[str, str]:
    """Names and contents; a table without rows is no file."""
    return {
        f"{name}.csv": as_csv(_LONG if name == "statistics" else _columns(rows), rows)
        for name, rows in tables(record).items()
        if rows
    }


def as_json(record: ActivationsRecord) -> str:
    """The record with its tables; percentiles of channels are in its layers alone."""
    told = {
        name: rows for name, rows in tables(record).items() if name not in ("ranges", "statistics")
    }
    return json.dumps({**record, "tables": told}, allow_nan=False, ensure_ascii=True) + "\n"
