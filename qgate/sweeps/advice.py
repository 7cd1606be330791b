"""Recommend one level of a sweep, with the reasons for it."""

from __future__ import annotations

import math

import numpy as np

from qgate.metrics import METRICS
from qgate.stats.summary import Floats
from qgate.sweeps.record import (
    COSTLY_DB,
    USUAL,
    LossLevels,
    MetricSpread,
    SweepAdvice,
    SweptLevel,
    UsualScale,
)

SIGNIFICANT, HIGH = 0.001, 0.01
WEIGHTS = {"mse": 0.3, "cosine": 0.3, "psnr_db": 0.2, "mae": 0.1, "relative_error": 0.1}
_BEST_OF = ("sqnr_db", "mse", "cosine", "psnr_db", "mae", "relative_error")
_SAME = 1e-9
_MUCH_DB = 1.0
"""What amax / max gains where it is recommended in place of a power of two."""
_ANY_BITS = 8
"""Scale bits that stand for no request of narrower exponents."""
_IN_FLOAT32 = (2.0**-126, float(np.finfo(np.float32).max))
_PRODUCTION: UsualScale = {"kind": "production", "exponent": 0.0}


def severity(share: float) -> str:
    """Grade a share: "high" above 1 %, "moderate" from 0.1 %, else "none"."""
    return "high" if share > HIGH else "moderate" if share >= SIGNIFICANT else "none"


def normalized(values: list[float], *, lower: bool) -> list[float]:
    """Map values to 0 for the worst to 1 for the best; a constant is 1 for all.

    An infinite value is the best or the worst, and the finite ones are normalized among themselves.
    """
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def part(value: float) -> float:
        if math.isnan(value):
            return 0.0
        if math.isinf(value):
            return float((value < 0) == lower)
        part = (value - low) / (high - low) if high > low else float(not lower)
        return 1.0 - part if lower else part

    return [part(value) for value in values]


def scores(levels: list[SweptLevel]) -> list[float]:
    """Weigh 30 % MSE, 30 % cosine, 20 % PSNR, 10 % MAE, 10 % relative error; cosine as it is."""
    total = np.zeros(len(levels))
    for name, weight in WEIGHTS.items():
        values = [level["metrics"][name] for level in levels]
        if METRICS.get(name).bounded:
            part = [0.0 if math.isnan(v) else v for v in values]
        else:
            part = normalized(values, lower=_is_lower_better(name))
        total += weight * np.asarray(part)
    return [float(value) for value in total]


def _is_lower_better(name: str) -> bool:
    return METRICS.get(name).direction != "higher"


def _best(name: str, levels: list[SweptLevel]) -> SweptLevel:
    """Return the level with the best value; of equals the least overflow, the largest exponent."""
    sign = 1.0 if _is_lower_better(name) else -1.0

    def rank(level: SweptLevel) -> tuple[float, float, float]:
        value = sign * level["metrics"][name]
        return math.inf if math.isnan(value) else value, level["overflow"], -level["exponent"]

    return min(levels, key=rank)


def _same_error(a: SweptLevel, b: SweptLevel) -> bool:
    """Tell if two levels differ by no more than the rounding of their sums."""
    return all(
        a["metrics"][name] == b["metrics"][name]
        or abs(a["metrics"][name] - b["metrics"][name]) <= _SAME * b["metrics"][name]
        for name in ("mse", "mae")
    )


def _cost_db(level: SweptLevel, finest: SweptLevel) -> float:
    """Return how much more squared error a level has than the best one."""
    more, least = level["metrics"]["mse"], finest["metrics"]["mse"]
    if math.isnan(more) or more <= least:
        return 0.0
    return 10 * math.log10(more / least) if least > 0 else math.inf


def advise(
    levels: list[SweptLevel],
    *,
    block: bool,
    scale_bits: int = 8,
    usual: UsualScale = _PRODUCTION,
) -> SweepAdvice:
    """Recommend one level, say why, and fill in each level's score.

    `usual` is the scale in use today: its level has its kind as a mark, and of levels with the same
    error the nearest one to it is recommended. That is a power of two, unless the usual scale is
    amax / max, any number, and `_MUCH_DB` better; scales of fewer than 8 bits are exponents.
    """
    for level, score in zip(levels, scores(levels), strict=True):
        level["score"] = score
    usable = [level for level in levels if level["e8m0"]]
    usable = usable or [level for level in levels if level["integer"]] or levels
    # In a block a few elements saturate by design, and what counts is the energy that they lose.
    kind = "overflow_energy" if block else "overflow_share"
    finest = _best("mse", usable)
    calm = [level for level in usable if level[kind] <= HIGH]
    calm += [finest] if calm and finest not in calm else []
    least = min(
        usable,
        key=lambda level: (
            max(level["overflow_share"], level["underflow_share"]),
            level["metrics"]["mse"],
            -level["exponent"],
        ),
    )
    issue = "more than 1 % of the energy lost to overflow" if block else "high overflow"
    candidates, chosen = f"levels without {issue}", least
    if calm:
        top = min(calm, key=lambda x: (-x["score"], x["overflow"], -x["exponent"]))
        chosen = min(
            (level for level in calm if _same_error(level, top)),
            key=lambda x: (abs(x["exponent"] - usual["exponent"]), -x["exponent"]),
        )
    else:
        candidates = "all levels overflow: least problematic"
    current = next((level for level in levels if usual["kind"] in level["marks"]), None)
    power = None
    if current is not None and usual["kind"] == "amax" and scale_bits == _ANY_BITS:
        gain = _gap_db(current, chosen)
        if (
            gain is not None
            and gain > _MUCH_DB
            and _IN_FLOAT32[0] <= current["factor"] <= _IN_FLOAT32[1]
        ):
            chosen, power = current, chosen
            finest = _best("mse", [*usable, current])
    index_of = {id(level): index for index, level in enumerate(levels)}
    clean = [index for index, level in enumerate(levels) if not level["significant"]]
    gap = _gap_db(chosen, current) if current is not None else None
    best = {name: _best(name, levels) for name in _BEST_OF}
    ends = [name for name in ("maximum", "minimum") if name in chosen["marks"]]
    advice: SweepAdvice = {
        "best": {name: index_of[id(level)] for name, level in best.items()},
        "recommended": index_of[id(chosen)],
        "position": None if block else [*ends, "between"][0],
        "candidates": candidates,
        "stability": _stability(levels),
        "overflow": _issues(levels, "overflow"),
        "underflow": _issues(levels, "underflow"),
        "clean_range": [clean[0], clean[-1]] if clean else None,
        "least_problematic": None if clean else index_of[id(least)],
        "usual_gap_db": gap,
        "best_mse": index_of[id(finest)],
        "mse_cost_db": _cost_db(chosen, finest),
        "speaks_about": (
            "a factor of every block's own scale"
            if usual["kind"] == "own"
            else "an offset to every block's own exponent"
            if block
            else "one scale for the whole tensor"
        ),
        "reasons": [],
        "power": index_of[id(power or chosen)],
    }
    advice["reasons"] += _reasons(levels, advice, block=block)
    if current is not None and gap is not None and not math.isnan(chosen["metrics"]["sqnr_db"]):
        word, is_same = "offset" if block else "exponent", current is chosen
        advice["reasons"].append(_against_usual(current, gap, usual["kind"], word, is_same))
    if power is not None:
        advice["reasons"].append(_against_power(chosen, power))
    elif not chosen["e8m0"]:
        advice["reasons"].insert(0, f"No level of this sweep is a scale of {scale_bits} bits!")
    return advice


def _against_power(chosen: SweptLevel, power: SweptLevel) -> str:
    """Say what is lost where scales have to be powers of two."""
    gap = _gap_db(chosen, power)
    lost = "not exact" if gap is None or math.isinf(gap) else f"SQNR {gap:.2f} dB lower"
    return f"Of powers of two, which scales in E8M0 are, use 2^{power['exponent']:g}: {lost}."


def _gap_db(chosen: SweptLevel, usual: SweptLevel) -> float | None:
    """Return the SQNR of the recommended level less that of the usual one."""
    ours, theirs = chosen["metrics"]["sqnr_db"], usual["metrics"]["sqnr_db"]
    gap = 0.0 if ours == theirs else ours - theirs
    return None if math.isnan(gap) else gap


def _stability(levels: list[SweptLevel]) -> dict[str, MetricSpread]:
    """Measure how the metrics vary over the integer levels, or over all without any."""
    choices = [level for level in levels if level["integer"]] or levels
    stability: dict[str, MetricSpread] = {}
    for name in ("mse", "cosine", "psnr_db", "sqnr_db"):
        values = [level["metrics"][name] for level in choices]
        finite = [v for v in values if math.isfinite(v)] or [math.nan]
        low, high = min(finite), max(finite)
        spread = stability[name] = {"min": low, "max": high, "std": _deviation(np.array(finite))}
        definition = METRICS.get(name)
        if definition.logarithm:
            wide = high - low
            spread["range"] = "large" if wide > 20 else "moderate" if wide > 10 else "small"
        elif definition.bounded:
            spread["stable"] = high - low < 0.01
        else:
            spread["stable"] = high == low or (low > 0 and (high - low) / low < 0.1)
    return stability


def _deviation(values: Floats) -> float:
    """Return `np.std`, which takes three times as long for few values."""
    from_mean = values - np.add.reduce(values) / len(values)
    return math.sqrt(np.add.reduce(from_mean * from_mean) / len(values))


def _issues(levels: list[SweptLevel], kind: str) -> LossLevels:
    shares = [level[f"{kind}_share"] for level in levels]
    grades = [level["severity"][kind] for level in levels]
    # Of levels that saturate as many elements, the one that loses more energy is worse.
    costs = [level.get(f"{kind}_energy", 0.0) for level in levels]
    worst = max(range(len(levels)), key=lambda i: (costs[i], shares[i], -i))
    issues: LossLevels = {
        "high": [i for i, grade in enumerate(grades) if grade == "high"],
        "moderate": [i for i, grade in enumerate(grades) if grade == "moderate"],
        "worst": worst if any(shares) else None,
    }
    if kind == "underflow":
        issues["best"] = int(np.argmin(shares)) if any(shares) else None
    return issues


def _reasons(levels: list[SweptLevel], advice: SweepAdvice, *, block: bool) -> list[str]:
    level = levels[advice["recommended"]]
    sqnr, top = level["metrics"]["sqnr_db"], levels[advice["best"]["sqnr_db"]]
    if math.isnan(sqnr):
        return ["No scale of this width reaches these numbers: the result holds NaN."]
    most = top["metrics"]["sqnr_db"]
    if sqnr == math.inf:
        reasons = ["Every value is represented exactly."]
    elif most > sqnr:
        text = "no error" if most == math.inf else f"{most:.2f} dB at {top['exponent']:g}"
        reasons = [f"SQNR {sqnr:.2f} dB; the best of all levels has {text}."]
    else:
        reasons = [f"SQNR {sqnr:.2f} dB, the best of all levels."]
    if advice["mse_cost_db"] > COSTLY_DB:
        reasons.append(
            f"It loses {advice['mse_cost_db']:.2f} dB against the level with the best MSE, "
            f"{'offset' if block else 'exponent'} {levels[advice['best_mse']]['exponent']:g}; "
            "the composite score prefers it."
        )
    key = "overflow_energy" if block else "overflow_share"
    left_out = sum(level[key] > HIGH for level in levels)
    if not advice["candidates"].startswith("levels"):
        reasons.append("Every level overflows more than 1 %; this one loses the least.")
    elif left_out:
        loss = "lose more than 1 % of the energy to overflow" if block else "overflow more than 1 %"
        reasons.append(f"{left_out} of {len(levels)} levels {loss} and were left out.")
    if level["overflow"]:
        reasons.append(
            f"{level['overflow']} elements ({level['overflow_share']:.2%}) saturate here and lose "
            f"{level['overflow_energy']:.2%} of the tensor's energy."
        )
    elif not block:
        reasons.append("Nothing overflows at this scale.")
    if level["flush"]:
        reasons.append(
            f"{level['flush']} elements ({level['flush_share']:.2%}) become zero, "
            f"{level['flush_energy']:.2g} of the energy."
        )
    return reasons


def _against_usual(
    usual: SweptLevel, gap: float, kind: str, word: str, is_recommended: bool
) -> str:
    grade = "is as good" if gap == 0 else f"has {abs(gap):.2f} dB {'less' if gap > 0 else 'more'}"
    if kind == "production":
        if is_recommended:
            return f"It is the {word} that MX's floor rule uses."
        return f"The {word} of MX's floor rule, {usual['exponent']:g}, {grade}."
    if is_recommended:
        return f"It is the scale of {USUAL[kind]}."
    name = USUAL[kind].removeprefix("the ")
    name = name if name == USUAL[kind] else f"The {name}"
    return f"{name}, 2^{usual['exponent']:.4g}, {grade}."
