"""One recommendation from the levels of a sweep, and the reasons for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from qgate.metrics import METRICS
from qgate.sweeps.record import COSTLY_DB

Level = dict[str, Any]

SIGNIFICANT, HIGH = 0.001, 0.01
WEIGHTS = {"mse": 0.3, "cosine": 0.3, "psnr_db": 0.2, "mae": 0.1, "relative_error": 0.1}
_SAME = 1e-9
# How a reason names the scale in use.
_USUAL = {"amax": "amax / max", "cast": "the plain cast"}


def severity(share: float) -> str:
    """ "high" above 1 %, "moderate" from 0.1 %, else "none"."""
    return "high" if share > HIGH else "moderate" if share >= SIGNIFICANT else "none"


def normalized(values: list[float], *, lower: bool) -> list[float]:
    """0 for the worst to 1 for the best; a constant is 1 for all, and an infinite value the best
    there is, with the finite ones normalized among themselves."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    found = []
    for value in values:
        if math.isnan(value):
            found.append(0.0)
        elif math.isinf(value):
            found.append(1.0 if (value < 0) == lower else 0.0)
        elif high == low:
            found.append(1.0)
        else:
            part = (value - low) / (high - low)
            found.append(1.0 - part if lower else part)
    return found


def scores(levels: list[Level]) -> list[float]:
    """30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error; cosine counts as it is."""
    total = np.zeros(len(levels))
    for name, weight in WEIGHTS.items():
        values = [level["metrics"][name] for level in levels]
        if METRICS.get(name).bounded:
            part = [0.0 if math.isnan(v) else v for v in values]
        else:
            part = normalized(values, lower=METRICS.get(name).direction != "higher")
        total += weight * np.asarray(part)
    return [float(value) for value in total]


def best(levels: list[Level], name: str, *, lower: bool) -> int:
    """The level with the best value; of equals the one with less overflow, then the larger one."""

    return min(range(len(levels)), key=lambda i: _rank(levels[i], name, lower=lower))


def _rank(level: Level, name: str, *, lower: bool) -> tuple[float, float, float]:
    value = level["metrics"][name]
    value = math.inf if math.isnan(value) else value if lower else -value
    return value, level["overflow"], -level["exponent"]


def _same_error(a: Level, b: Level) -> bool:
    """Tell if two levels differ by no more than the rounding of their sums."""
    return all(
        a["metrics"][name] == b["metrics"][name]
        or abs(a["metrics"][name] - b["metrics"][name]) <= _SAME * b["metrics"][name]
        for name in ("mse", "mae")
    )


def _cost_db(level: Level, finest: Level) -> float:
    """How much more squared error a level has than the best one, in decibels."""
    more, least = level["metrics"]["mse"], finest["metrics"]["mse"]
    if math.isnan(more) or more <= least:
        return 0.0
    return 10 * math.log10(more / least) if least > 0 else math.inf


def advise(
    levels: list[Level],
    *,
    block: bool,
    scale_bits: int = 8,
    usual: Mapping[str, Any] = MappingProxyType({"kind": "production", "exponent": 0.0}),
) -> dict[str, Any]:
    """Fills in each level's score; see `report` for what is made of the rest.

    `usual` is the scale in use today: its level has its kind as a mark, and of levels with the same
    error the nearest one to it is recommended.
    """
    for level, score in zip(levels, scores(levels), strict=True):
        level["score"] = score
    usable = [i for i, level in enumerate(levels) if level["e8m0"]]
    usable = usable or [i for i, level in enumerate(levels) if level["integer"]]
    usable = usable or list(range(len(levels)))
    # In a block a few elements saturate by design, and what counts is the energy that they lose.
    kind = "overflow_energy" if block else "overflow_share"
    finest = min(usable, key=lambda i: _rank(levels[i], "mse", lower=True))
    calm = [i for i in usable if levels[i][kind] <= HIGH]
    calm += [finest] if calm and finest not in calm else []
    what = "more than 1 % of the energy lost to overflow" if block else "high overflow"
    candidates = f"levels without {what}" if calm else "all levels overflow"
    least = min(
        usable,
        key=lambda i: (
            max(levels[i]["overflow_share"], levels[i]["underflow_share"]),
            levels[i]["metrics"]["mse"],
            -levels[i]["exponent"],
        ),
    )
    if calm:
        chosen = min(
            calm,
            key=lambda i: (-levels[i]["score"], levels[i]["overflow"], -levels[i]["exponent"]),
        )
        chosen = min(
            (i for i in calm if _same_error(levels[i], levels[chosen])),
            key=lambda i: (
                abs(levels[i]["exponent"] - usual["exponent"]),
                -levels[i]["exponent"],
            ),
        )
    else:
        chosen = least
        candidates += ": least problematic"
    clean = [i for i, level in enumerate(levels) if not level["significant"]]
    held = next((i for i, level in enumerate(levels) if usual["kind"] in level["marks"]), None)
    gap = None
    if held is not None:
        here, there = (levels[i]["metrics"]["sqnr_db"] for i in (chosen, held))
        gap = 0.0 if here == there else here - there
        gap = None if math.isnan(gap) else gap
    advice: dict[str, Any] = {
        "best": {
            name: best(levels, name, lower=METRICS.get(name).direction != "higher")
            for name in ("sqnr_db", "mse", "cosine", "psnr_db", "mae", "relative_error")
        },
        "recommended": chosen,
        "position": None if block else _position(levels, chosen),
        "candidates": candidates,
        "stability": _stability(levels),
        "overflow": _issues(levels, "overflow"),
        "underflow": _issues(levels, "underflow"),
        "clean_range": [clean[0], clean[-1]] if clean else None,
        "least_problematic": None if clean else least,
        "usual_gap_db": gap,
        "best_mse": finest,
        "mse_cost_db": _cost_db(levels[chosen], levels[finest]),
        "speaks_about": (
            "an offset to every block's own exponent" if block else "one scale for the whole tensor"
        ),
    }
    advice["reasons"] = _reasons(levels, advice, usual, block=block)
    if not levels[chosen]["e8m0"]:
        advice["reasons"].insert(0, f"No level of this sweep is a scale of {scale_bits} bits!")
    return advice


def _position(levels: list[Level], chosen: int) -> str:
    """Where the recommended exponent lies between the alignment ends."""
    for name in ("maximum", "minimum"):
        if name in levels[chosen]["marks"]:
            return name
    return "between"


def _stability(levels: list[Level]) -> dict[str, Any]:
    """How the metrics vary over the levels that one could choose."""
    told = [level for level in levels if level["integer"]]
    found: dict[str, Any] = {}
    for name in ("mse", "cosine", "psnr_db", "sqnr_db"):
        values = [level["metrics"][name] for level in told or levels]
        finite = [v for v in values if math.isfinite(v)] or [math.nan]
        low, high = min(finite), max(finite)
        found[name] = {"min": low, "max": high, "std": float(np.std(finite))}
        known = METRICS.get(name)
        if known.logarithm:
            wide = high - low
            found[name]["range"] = "large" if wide > 20 else "moderate" if wide > 10 else "small"
        elif known.bounded:
            found[name]["stable"] = high - low < 0.01
        else:
            found[name]["stable"] = high == low or (low > 0 and (high - low) / low < 0.1)
    return found


def _issues(levels: list[Level], kind: str) -> dict[str, Any]:
    shares = [level[f"{kind}_share"] for level in levels]
    found: dict[str, Any] = {
        grade: [i for i, level in enumerate(levels) if level["severity"][kind] == grade]
        for grade in ("high", "moderate")
    }
    # What saturation costs tells levels apart that saturate as many elements.
    costs = [level.get(f"{kind}_energy", 0.0) for level in levels]
    worst = max(range(len(levels)), key=lambda i: (costs[i], shares[i], -i))
    found["worst"] = worst if any(shares) else None
    if kind == "underflow":
        found["best"] = int(np.argmin(shares)) if any(shares) else None
    return found


def _reasons(
    levels: list[Level], advice: dict[str, Any], usual: Mapping[str, Any], *, block: bool
) -> list[str]:
    level = levels[advice["recommended"]]
    word = "offset" if block else "exponent"
    reasons = []
    sqnr = level["metrics"]["sqnr_db"]
    top = levels[advice["best"]["sqnr_db"]]
    if math.isnan(sqnr):
        return ["No scale of this width reaches these numbers: the result holds NaN."]
    if math.isinf(sqnr) and sqnr > 0:
        reasons.append("Every value is represented exactly.")
    else:
        ahead = top["metrics"]["sqnr_db"] > sqnr
        rest = f"; the best of all levels has {_db(top)}." if ahead else ", the best of all levels."
        reasons.append(f"SQNR {sqnr:.2f} dB{rest}")
    if advice["mse_cost_db"] > COSTLY_DB:
        finest = levels[advice["best_mse"]]
        reasons.append(
            f"It loses {advice['mse_cost_db']:.2f} dB against the level with the best MSE, {word} "
            f"{finest['exponent']:g}; the composite score prefers it."
        )
    kind = "overflow_energy" if block else "overflow_share"
    left_out = sum(level[kind] > HIGH for level in levels)
    if advice["candidates"].startswith("levels") and left_out:
        what = "lose more than 1 % of the energy to overflow" if block else "overflow more than 1 %"
        reasons.append(f"{left_out} of {len(levels)} levels {what} and were left out.")
    elif not advice["candidates"].startswith("levels"):
        reasons.append("Every level overflows more than 1 %; this one loses the least.")
    if level["overflow"]:
        reasons.append(
            f"{level['overflow']} elements ({level['overflow_share']:.2%}) saturate here and lose "
            f"{level['overflow_energy']:.2%} of the tensor's energy."
        )
    elif not block:
        reasons.append("Nothing overflows.")
    if level["flush"]:
        reasons.append(
            f"{level['flush']} elements ({level['flush_share']:.2%}) become zero, "
            f"{level['flush_energy']:.2g} of the energy."
        )
    return [*reasons, *_against_usual(levels, advice, usual, word)]


def _against_usual(
    levels: list[Level], advice: dict[str, Any], usual: Mapping[str, Any], word: str
) -> list[str]:
    gap, kind = advice["usual_gap_db"], usual["kind"]
    held = next((level for level in levels if kind in level["marks"]), None)
    if held is None or gap is None:
        return []
    is_recommended = held is levels[advice["recommended"]]
    said = "is as good" if gap == 0 else f"has {abs(gap):.2f} dB {'less' if gap > 0 else 'more'}"
    if kind == "production":
        if is_recommended:
            return [f"It is the {word} that MX's floor rule uses."]
        return [f"The {word} of MX's floor rule, {held['exponent']:g}, {said}."]
    if is_recommended:
        return [f"It is the scale of {_USUAL[kind]}."]
    return [f"{_USUAL[kind]}, 2^{held['exponent']:.4g}, {said}.".replace("the plain", "The plain")]


def _db(level: Level) -> str:
    value = level["metrics"]["sqnr_db"]
    return "no error" if value == math.inf else f"{value:.2f} dB at {level['exponent']:g}"
