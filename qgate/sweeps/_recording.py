"""A sweep as plain data."""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np
import torch

from qgate._version import __version__
from qgate.formats import ElementFormat
from qgate.formats.mx import MxFormat
from qgate.scales.levels import Level, MeetingExponents, Usual
from qgate.stats import Counts, Values
from qgate.sweeps import advice as advising
from qgate.sweeps._sums import LevelSums


def record_of(
    kind: str,
    fmt: ElementFormat | MxFormat,
    summary: Counts | Values,
    name: str,
    shape: list[int] | None,
    places: list[Level],
    sums: LevelSums,
    scale_bits: int,
) -> dict[str, Any]:
    element = fmt.element
    odd = {"NaN": summary.nan, "Inf": summary.posinf + summary.neginf}
    bad = " and ".join(f"{count} {what}" for what, count in odd.items() if count)
    rounded = summary.rounded_from
    return {
        "kind": kind,
        "format": {
            "name": fmt.name,
            "layout": fmt.layout,
            "bits": fmt.bits,
            "max": element.max,
            "min_normal": element.min_normal,
            "min_subnormal": element.min_subnormal,
            "max_exponent": element.max_exponent,
            "rounding": element.rounding,
        },
        "tensor": {
            "name": name,
            "path": None,
            "shape": shape,
            "dtype": rounded or summary.dtype,
            "sha256": None,
            "elements": summary.n,
            "nan": summary.nan,
            "posinf": summary.posinf,
            "neginf": summary.neginf,
            "zeros": summary.zeros,
            "min": summary.min,
            "max": summary.max,
            "amax": summary.amax,
            "amin": summary.amin,
            "mean": summary.mean,
            "std": summary.std,
            "rounded_to": summary.dtype if rounded else None,
        },
        "levels": [
            _level(sums, i, place, scale_bits, summary.finite) for i, place in enumerate(places)
        ],
        "failed": f"{bad} in the tensor" if bad else None,
        "versions": {
            "qgate": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def _level(sums: LevelSums, i: int, place: Level, scale_bits: int, finite: int) -> dict[str, Any]:
    exponent = place.exponent
    energy = sums.r_square or 1.0
    shares = {
        "overflow": float(sums.saturated[i] / finite),
        "underflow": float(sums.underflow[i] / finite),
        "flush": float(sums.flushed[i] / finite),
    }
    limit = 2 ** (scale_bits - 1) - 1
    fits = not (sums.clamped[i] or sums.broken[i])
    return {
        "exponent": exponent,
        "integer": place.integer,
        "factor": place.factor,
        "e8m0": place.integer and abs(exponent) <= limit and bool(fits),
        "marks": list(place.marks),
        "metrics": sums.metrics(i),
        "overflow": int(sums.saturated[i]),
        "overflow_share": shares["overflow"],
        "overflow_energy": float(sums.saturated_noise[i] / energy),
        "underflow": int(sums.underflow[i]),
        "underflow_share": shares["underflow"],
        "flush": int(sums.flushed[i]),
        "flush_share": shares["flush"],
        "flush_energy": float(sums.flushed_energy[i] / energy),
        "severity": {kind: advising.severity(share) for kind, share in shares.items()},
        "significant": max(shares["overflow"], shares["underflow"]) > advising.SIGNIFICANT,
    }


def tensor_parameters(
    ends: MeetingExponents, levels: int, scale_bits: int, usual: Usual
) -> dict[str, Any]:
    return {
        "levels": levels,
        "max_exp": float(ends.maximum),
        "min_exp": float(ends.minimum),
        "alignment": ends.alignment,
        "scale_bits": scale_bits,
        "usual": {"kind": usual.kind, "exponent": usual.exponent},
        "production": int(usual.exponent) if usual.kind == "production" else None,
        "block": None,
        "axis": None,
        "scale_rule": None,
    }


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
