"""Two dumps of layers against each other: plain records, which reports show and files keep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from qgate.errors import QgateError
from qgate.gate import grades_of
from qgate.stats import AxisErrors, ErrorStats, errors
from qgate.storage.files import replacing

KIND = "comparison"
VERSION = 1
Record = dict[str, Any]
_PAIRED = ("model", "weights", "inputs", "samples", "basis")
_SIGN = np.int64(-(2**31))


def comparison(folder: Path, mode: str, reference: str = REFERENCE) -> Record:
    """Every layer of a captured mode against the reference in the basis of the mode."""
    actual, true = _pair(folder, mode, reference)
    _check_pair(actual, true, folder)
    layers = {name: _layer(folder, actual, true, name) for name in true.layers}
    record: Record = {
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
        "percentile_error": ErrorStats.percentile_error,
        "layers": layers,
        "nonfinite_casts": _bad_casts(actual) + _bad_casts(true),
    }
    record["summary"] = _summary(layers)
    return record


def comparable_modes(folder: Path, reference: str = REFERENCE) -> list[str]:
    """All captured modes but the reference; of another one's fp32 that in its basis."""
    true = find(folder, reference)
    dumps = [read_dump(folder, stem) for stem in captured(folder)]
    stems = {dump.of.stem for dump in true}
    bases = {dump.of.basis for dump in true}
    return [
        dump.of.mode
        for dump in dumps
        if dump.of.stem not in stems and (dump.of.mode != REFERENCE or dump.of.basis in bases)
    ]


def is_clean(record: Record) -> bool:
    """Whether something was compared, and all of it was finite."""
    layers = record["layers"].values()
    found = [layer["mode_nonfinite"]["total"] + layer["fp_nonfinite"]["total"] for layer in layers]
    return bool(found) and not any(found) and not record["nonfinite_casts"]


def save_json(path: Path, record: Record) -> None:
    """Whole or not at all, with the folders above it."""
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
    a = _in(bases, actual) or actual[0]
    r = _in({a.of.basis}, true)
    if r is None and a.of.mode != REFERENCE and true[0].of.mode == REFERENCE:
        raise QgateError(
            f"the reference {reference} was not captured in basis {a.of.basis!r}, in which mode "
            f"{a.of.mode} is: capture that mode again into {str(folder)!r}."
        )
    r = r or true[0]
    if a.of.stem == r.of.stem:
        raise QgateError(f"{mode} is the reference itself: there is nothing to compare.")
    return a, r


def _in(bases: Iterable[str], dumps: list[LayerCapture]) -> LayerCapture | None:
    return next((dump for dump in dumps if dump.of.basis in bases), None)


def _check_pair(actual: LayerCapture, true: LayerCapture, folder: Path) -> None:
    """Refuse numbers that would mean nothing."""
    a, r = actual.of, true.of
    fields = [*_PAIRED, *(["calibration"] if a.calibration and r.calibration else [])]
    apart = [
        f"{name} {_brief(getattr(a, name))} and {_brief(getattr(r, name))}"
        for name in fields
        if getattr(a, name) != getattr(r, name)
    ]
    lacking = sorted(actual.layers.keys() ^ true.layers.keys())
    if lacking:
        apart.append(f"layers {', '.join(actual.layers)} and {', '.join(true.layers)}")
    for name in actual.layers.keys() & true.layers.keys():
        one, other = actual.layers[name], true.layers[name]
        apart += [
            f"{name} with {what} {list(old)} and {list(new)}"
            for what, old, new in (
                ("shape", one.shape, other.shape),
                ("tokens", one.tokens, other.tokens),
            )
            if old != new
        ]
        if one.site != other.site:
            apart.append(f"{name} at {one.site} and {other.site}")
    if apart:
        raise QgateError(
            f"mode {a.mode} and reference {r.stem} in {str(folder)!r} cannot be compared, they "
            f"have {'; '.join(apart)}. Capture both in one run, or choose a reference that fits."
        )


def _brief(value: object) -> str:
    text = str(value)
    return repr(value) if len(text) < 40 else f"{text[:12]}…"


def _machine(dump: LayerCapture) -> str:
    return f"{dump.of.device}, torch {dump.of.torch}, qgate {dump.of.qgate}, {dump.of.created}"


def _bad_casts(dump: LayerCapture) -> int:
    return sum(int(counts.get("nonfinite", 0)) for counts in dump.casts.values())


# One layer -------------------------------------------------------------------------------------


def _layer(folder: Path, actual: LayerCapture, true: LayerCapture, name: str) -> Record:
    """All numbers of a layer; what is no number is null, and `reasons` says why."""
    a, r = open_layer(folder, actual, name), open_layer(folder, true, name)
    found = errors(torch.from_numpy(a), torch.from_numpy(r), channel_axis=1, token_axis=0, worst=3)
    sides = {"mode": Moments(), "fp": Moments()}
    apart, ulps = Moments(), 0
    for x, y in portions(a, r):
        sides["mode"].add(x)
        sides["fp"].add(y)
        both = np.isfinite(x) & np.isfinite(y)
        apart.add(x[both].astype(np.float64) - y[both].astype(np.float64))
        ulps = max(ulps, _ulps(x[both], y[both]))
    reasons: dict[str, str] = {}
    record: Record = {"elements": found.elements, "shape": list(a.shape)}
    for side, moments in sides.items():
        for key, value in moments.to_dict().items():
            record[f"{side}_{key}"] = value
            if value is None:
                reasons[f"{side}_{key}"] = moments.reason
    differences = apart.to_dict()
    values = found.metrics()
    numbers = {
        "diff_mean": differences["mean"] if found.finite else math.nan,
        "diff_std": differences["std"] if found.finite else math.nan,
        "abs_diff_mean": values["mae"],
        "abs_diff_max": values["max_abs"],
        **values,
        **{f"abs_diff_{key}": value for key, value in found.percentiles().items()},
    }
    for key, value in numbers.items():
        good = value is not None and math.isfinite(value)
        record[key] = value if good else None
        if not good:
            reasons[key] = _why(found, sides)
    record |= {
        "grades": grades_of({key: record[key] for key in ("mse", "correlation")}),
        "max_ulp": ulps if found.finite else None,
        "sign_flips": found.sign_flips,
        "constant": [side for side, m in sides.items() if m.count and m.low == m.high],
        "worst_channel": _worst(found.channels),
        "worst_token": _placed(_worst(found.tokens), true.layers[name]),
        "worst_elements": [
            {"index": list(e.index), "mode": e.actual, "fp": e.reference} for e in found.worst
        ],
        "mode_nonfinite": _counted(sides["mode"]),
        "fp_nonfinite": _counted(sides["fp"]),
        "first_nonfinite": None
        if found.first_non_finite is None
        else list(found.first_non_finite.index),
        "reasons": reasons,
    }
    return record


def _why(found: ErrorStats, sides: dict[str, Moments]) -> str:
    """Why a metric is no number."""
    if not found.finite:
        said = [f"{side}: {m.reason}" for side, m in sides.items() if m.reason]
        return f"not finite ({'; '.join(said)})"
    if found.metric("max_abs") == 0:
        return "no error"
    return "reference energy zero" if not found.sums.max_abs_reference else "no values"


def _counted(moments: Moments) -> dict[str, int]:
    return {**moments.non_finite, "total": sum(moments.non_finite.values())}


def _ulps(x: Array, y: Array) -> int:
    """The largest distance in steps of float32."""
    if not x.size:
        return 0
    steps = [np.ascontiguousarray(side).view(np.int32).astype(np.int64) for side in (x, y)]
    one, other = (np.where(s < 0, _SIGN - s, s) for s in steps)
    return int(np.abs(one - other).max())


def _worst(axis: AxisErrors | None) -> Record | None:
    """The index with the largest squared error and its share of all of it; finite pairs only."""
    if axis is None or not axis.sum_square_error.any():
        return None
    squares = axis.sum_square_error
    index = int(np.argmax(squares))
    finite = axis.finite_only()
    relative = float(finite.relative_mse[index])
    return {
        "index": index,
        "mse": float(finite.mse[index]),
        "relative_mse": relative if math.isfinite(relative) else None,
        "share": float(squares[index] / squares.sum()),
    }


def _placed(worst: Record | None, layer: LayerRecord) -> Record | None:
    """With sample and token of a row, as ragged samples lie one after the other."""
    if worst is None:
        return None
    ends = np.cumsum(layer.tokens)
    sample = int(np.searchsorted(ends, worst["index"], side="right"))
    token = worst["index"] - int(ends[sample]) + layer.tokens[sample]
    return {**worst, "sample": sample, "token": token}


def _summary(layers: dict[str, Record]) -> Record:
    """Plain averages, as they are known, and the worst layer, which they hide."""
    made: Record = {}
    reasons: dict[str, str] = {}
    for key in ("mse", "mae", "correlation"):
        values = [layer[key] for layer in layers.values()]
        bad = [name for name, layer in layers.items() if layer[key] is None]
        made[f"avg_{key}"] = None if bad or not values else sum(values) / len(values)
        if bad:
            reasons[f"avg_{key}"] = f"no number in {', '.join(bad)}"
    known = {n: v["relative_mse"] for n, v in layers.items() if v["relative_mse"] is not None}
    worst = max(known, key=lambda name: known[name], default=None)
    made["worst_layer"] = worst
    made["worst_relative_mse"] = None if worst is None else known[worst]
    return {**made, "reasons": reasons}
