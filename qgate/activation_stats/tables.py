"""The tables of an analysis of activations: rows of plain values, one per layer and statistic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qgate.activation_stats.record import ActivationsRecord, LayerActivations

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
