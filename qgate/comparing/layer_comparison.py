"""Compare two layer captures into plain records, for reports and files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from qgate.comparing.exact_percentiles import exact_percentiles
from qgate.comparing.layer_files import (
    REFERENCE,
    Array,
    LayerCapture,
    LayerRecord,
    Moments,
    captured,
    find,
    open_layer,
    portions,
    read_dump,
)
from qgate.comparing.record import AverageErrors, ComparisonRecord, LayerComparison
from qgate.errors import QgateError
from qgate.metrics.grades import grades_of
from qgate.stats import AxisErrors, ErrorStats, errors
from qgate.stats.error_stats import PERCENTILES
from qgate.storage.files import replacing

KIND = "comparison"
VERSION = 1
_PAIRED = ("model", "weights", "inputs", "samples", "basis")
_INT32_MIN = np.int64(-(2**31))


def comparison(folder: Path, mode: str, reference: str = REFERENCE) -> ComparisonRecord:
    """Compare every layer of a captured mode with the reference in the basis of the mode."""
    actual, true = _pair(folder, mode, reference)
    _check_pair(actual, true, folder)
    layers = {name: _layer(folder, actual, true, name) for name in true.layers}
    return {
        "qgate": KIND,
        "version": VERSION,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "reference": true.of.mode,
        "reference_mode": true.of.stem,
        "compared_mode": actual.of.mode,
        "output_dir": str(folder),
        "model": actual.of.model,
        "basis": actual.of.basis,
        "weights": actual.of.weights,
        "inputs": actual.of.inputs,
        "samples": actual.of.samples,
        "made_on": {"mode": _machine(actual), "reference": _machine(true)},
        "percentile_error": 0.0,
        "layers": layers,
        "nonfinite_casts": _bad_casts(actual) + _bad_casts(true),
        "summary": _summary(layers),
    }


def comparable_modes(folder: Path, reference: str = REFERENCE) -> list[str]:
    """List the captured modes, without the reference and without FP32 in other bases."""
    true = find(folder, reference)
    dumps = [read_dump(folder, stem) for stem in captured(folder)]
    stems = {dump.of.stem for dump in true}
    bases = {dump.of.basis for dump in true}
    return [
        dump.of.mode
        for dump in dumps
        if dump.of.stem not in stems and (dump.of.mode != REFERENCE or dump.of.basis in bases)
    ]


def is_clean(record: ComparisonRecord) -> bool:
    """Tell whether layers were compared and all their values were finite."""
    layers = record["layers"].values()
    bad = [layer["mode_nonfinite"]["total"] + layer["fp_nonfinite"]["total"] for layer in layers]
    return bool(bad) and not any(bad) and not record["nonfinite_casts"]


def save_json(path: Path, record: ComparisonRecord) -> None:
    """Write a record whole or not at all, and make the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            text = json.dumps(record, indent=1, allow_nan=False) + "\n"
            part.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise QgateError(
            f"{str(path)!r} could not be written: {error.strerror}; name a file in a folder that "
            "you may write to."
        ) from None


# Which two -------------------------------------------------------------------------------------


def _pair(folder: Path, mode: str, reference: str) -> tuple[LayerCapture, LayerCapture]:
    actual, true = find(folder, mode), find(folder, reference)
    bases = {dump.of.basis for dump in (true if len(actual) > 1 else actual)}
    a = next((dump for dump in actual if dump.of.basis in bases), actual[0])
    same = [dump for dump in true if dump.of.basis == a.of.basis]
    if not same and a.of.mode != REFERENCE and true[0].of.mode == REFERENCE:
        raise QgateError(
            f"the reference {reference} was not captured in basis {a.of.basis!r}, in which mode "
            f"{a.of.mode} is: capture that mode again into {str(folder)!r}."
        )
    r = (same or true)[0]
    if a.of.stem == r.of.stem:
        raise QgateError(f"{mode} is the reference itself: there is nothing to compare.")
    return a, r


def _check_pair(actual: LayerCapture, true: LayerCapture, folder: Path) -> None:
    """Refuse two captures whose differences would mean nothing."""
    a, r = actual.of, true.of
    fields = [*_PAIRED, *(["calibration"] if a.calibration and r.calibration else [])]
    clashes = [
        f"{name} {_value_beginning(getattr(a, name))} and {_value_beginning(getattr(r, name))}"
        for name in fields
        if getattr(a, name) != getattr(r, name)
    ]
    lacking = sorted(actual.layers.keys() ^ true.layers.keys())
    if lacking:
        clashes.append(f"layers {', '.join(actual.layers)} and {', '.join(true.layers)}")
    for name in actual.layers.keys() & true.layers.keys():
        one, other = actual.layers[name], true.layers[name]
        clashes += [
            f"{name} with {key} {list(getattr(one, key))} and {list(getattr(other, key))}"
            for key in ("shape", "tokens")
            if getattr(one, key) != getattr(other, key)
        ]
        if one.site != other.site:
            clashes.append(f"{name} at {one.site} and {other.site}")
    if clashes:
        raise QgateError(
            f"mode {a.mode} and reference {r.stem} in {str(folder)!r} cannot be compared, they "
            f"have {'; '.join(clashes)}. Capture both in one run, or choose a reference that fits."
        )


def _value_beginning(value: object) -> str:
    text = str(value)
    return repr(value) if len(text) < 40 else f"{text[:12]}…"


def _machine(dump: LayerCapture) -> str:
    return f"{dump.of.device}, torch {dump.of.torch}, qgate {dump.of.qgate}, {dump.of.created}"


def _bad_casts(dump: LayerCapture) -> int:
    return sum(int(counts.get("nonfinite", 0)) for counts in dump.casts.values())


# One layer -------------------------------------------------------------------------------------


def _layer(folder: Path, actual: LayerCapture, true: LayerCapture, name: str) -> LayerComparison:
    """Compute all numbers of a layer; a missing one is null, and `reasons` says why."""
    a, r = open_layer(folder, actual, name), open_layer(folder, true, name)
    sums = errors(torch.from_numpy(a), torch.from_numpy(r), channel_axis=1, token_axis=0, worst=3)
    sides = {"mode": Moments(), "fp": Moments()}
    difference, ulps = Moments(), 0
    for x, y in portions(a, r):
        sides["mode"].add(x)
        sides["fp"].add(y)
        finite = np.isfinite(x) & np.isfinite(y)
        difference.add(x[finite].astype(np.float64) - y[finite].astype(np.float64))
        ulps = max(ulps, _ulps(x[finite], y[finite]))
    reasons: dict[str, str] = {}
    record: LayerComparison = {"elements": sums.elements, "shape": list(a.shape)}
    for side, moments in sides.items():
        for key, value in moments.to_dict().items():
            record[f"{side}_{key}"] = value
            if value is None:
                reasons[f"{side}_{key}"] = moments.reason
    moments_of_difference = difference.to_dict()
    values = sums.metrics()
    numbers = {
        "diff_mean": moments_of_difference["mean"] if sums.finite else math.nan,
        "diff_std": moments_of_difference["std"] if sums.finite else math.nan,
        "abs_diff_mean": values["mae"],
        "abs_diff_max": values["max_abs"],
        **values,
        **_percentiles(a, r, sums),
    }
    for key, value in numbers.items():
        good = value is not None and math.isfinite(value)
        record[key] = value if good else None
        if not good:
            reasons[key] = _why(sums, sides)
    first = sums.first_non_finite
    return record | {
        "grades": grades_of({key: record[key] for key in ("mse", "correlation")}),
        "max_ulp": ulps if sums.finite else None,
        "sign_flips": sums.sign_flips,
        "constant": [side for side, m in sides.items() if m.count and m.low == m.high],
        "worst_channel": _worst(sums.channels),
        "worst_token": _worst(sums.tokens, true.layers[name]),
        "worst_elements": [
            {"index": list(e.index), "mode": e.actual, "fp": e.reference} for e in sums.worst
        ],
        **{
            f"{side}_nonfinite": {**m.non_finite, "total": sum(m.non_finite.values())}
            for side, m in sides.items()
        },
        "first_nonfinite": None if first is None else list(first.index),
        "reasons": reasons,
    }


def _percentiles(a: Array, r: Array, sums: ErrorStats) -> dict[str, float]:
    """Return exact percentiles of |difference|; NaN where a value is not finite."""

    def differences() -> Iterator[Array]:
        for x, y in portions(a, r):
            yield x.astype(np.float64) - y.astype(np.float64)

    exact = exact_percentiles(differences if sums.finite else tuple, PERCENTILES)
    return {f"abs_diff_p{q}": value for q, value in zip(PERCENTILES, exact, strict=True)}


def _why(sums: ErrorStats, sides: dict[str, Moments]) -> str:
    """Say why a metric has no number."""
    if not sums.finite:
        reasons = [f"{side}: {m.reason}" for side, m in sides.items() if m.reason]
        return f"not finite ({'; '.join(reasons)})"
    if sums.metric("max_abs") == 0:
        return "no error"
    return "reference energy zero" if not sums.sums.max_abs_reference else "no values"


def _ulps(x: Array, y: Array) -> int:
    """Return the largest distance in steps of float32."""
    if not x.size:
        return 0
    steps = [np.ascontiguousarray(side).view(np.int32).astype(np.int64) for side in (x, y)]
    one, other = (np.where(s < 0, _INT32_MIN - s, s) for s in steps)
    return int(np.abs(one - other).max())


def _worst(
    axis: AxisErrors | None, layer: LayerRecord | None = None
) -> dict[str, float | None] | None:
    """Find the index with the largest squared error, and its share; finite pairs only.

    For the rows of a layer also the sample and its token: ragged samples lie one after the other.
    """
    if axis is None or not axis.sum_square_error.any():
        return None
    squares = axis.sum_square_error
    index = int(np.argmax(squares))
    finite = axis.finite_only()
    relative = float(finite.relative_mse[index])
    worst = {
        "index": index,
        "mse": float(finite.mse[index]),
        "relative_mse": relative if math.isfinite(relative) else None,
        "share": float(squares[index] / squares.sum()),
    }
    if layer is None:
        return worst
    ends = np.cumsum(layer.tokens)
    sample = int(np.searchsorted(ends, index, side="right"))
    return {**worst, "sample": sample, "token": index - int(ends[sample]) + layer.tokens[sample]}


def _summary(layers: dict[str, LayerComparison]) -> AverageErrors:
    """Average the layers, unweighted, and name the worst one, which an average hides."""
    errors_of = {n: v["relative_mse"] for n, v in layers.items() if v["relative_mse"] is not None}
    worst = max(errors_of, key=lambda name: errors_of[name], default=None)
    averages, reasons = {}, {}
    for key in ("mse", "mae", "correlation"):
        values = [layer[key] for layer in layers.values()]
        bad = [name for name, layer in layers.items() if layer[key] is None]
        averages[key] = None if bad or not values else sum(values) / len(values)
        if bad:
            reasons[f"avg_{key}"] = f"no number in {', '.join(bad)}"
    return {
        "avg_mse": averages["mse"],
        "avg_mae": averages["mae"],
        "avg_correlation": averages["correlation"],
        "worst_layer": worst,
        "worst_relative_mse": errors_of.get(worst or ""),
        "reasons": reasons,
    }
