"""The parts of a sweep's text that advise. They all speak of the one recommended level.

Other levels are named as facts (the best in one metric, the least overflow), never as what to use:
two pieces of advice that contradict each other are worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.metrics import METRICS
from qgate.sweeps._text_parts import THICK, THIN, heading, item, title
from qgate.sweeps.record import (
    Level,
    Record,
    decibel_text,
    exponent_text,
    factor_text,
    format_title,
    level_at,
    metric,
    mse_cost,
    number,
    offset_text,
    place_text,
    recommended,
    rest_db,
    share_text,
    usual_exponent,
    usual_gap,
    usual_kind,
    usual_level,
)
from qgate.text import counted, one_line

# The metrics whose best level is told, and the sign before it.
_BEST = {"sqnr_db": "🥇", "mse": "🏆", "cosine": "🎯", "psnr_db": "📊", "mae": "📏",
         "relative_error": "📐"}  # fmt: skip
# Those that are told beside each of them, and whose spread over the levels is.
_SHOWN = ("sqnr_db", "mse", "cosine", "psnr_db")


def _value(level: Level, name: str) -> str:
    return METRICS.get(name).text(metric(level, name))


def _brief(name: str) -> str:
    """`MSE`, `Cosine`: the name within a list."""
    known = METRICS.get(name)
    return known.short.capitalize() if known.bounded else known.label


def _optima(record: Record, names: Sequence[str]) -> list[str]:
    best = record["advice"]["best"]
    chosen = record["advice"].get("recommended")
    body = []
    for name, sign in _BEST.items():
        level = level_at(record, best.get(name))
        if name not in names or level is None:
            continue
        here = " <- recommended" if best[name] == chosen else ""
        body.append(f"{sign} Best {METRICS.get(name).label}: {place_text(record, level)}{here}")
        shown = dict.fromkeys([*_SHOWN, name])
        body.append("    " + ", ".join(f"{_brief(key)}: {_value(level, key)}" for key in shown))
    return body


def _losses(level: Level) -> list[str]:
    return [
        f"     - Overflow: {level['overflow']} ({share_text(level['overflow_share'])} of elements, "
        f"{share_text(level['overflow_energy'])} of the energy)",
        f"     - Flush to Zero: {level['flush']} ({share_text(level['flush_share'])} of elements, "
        f"{share_text(level['flush_energy'])} of the energy)",
    ]


def _gap(record: Record, best: Level) -> str:
    """How the recommended level stands to the one in use."""
    block = record["kind"] == "block"
    what = "offset" if block else "exponent"
    name = {"production": "Production", "amax": "amax / max", "cast": "Plain cast"}[
        usual_kind(record)
    ]
    if usual_kind(record) in best["marks"]:
        return f"{name} uses this {what} already"
    used = (offset_text if block else exponent_text)(usual_exponent(record))
    gap = usual_gap(record)
    level = usual_level(record)
    there = f", SQNR {decibel_text(metric(level, 'sqnr_db'))}" if level else ""
    if math.isnan(gap):
        return f"{name} {what}: {used}{there or ', not among the levels'}"
    if math.isinf(gap):
        return f"{name} {what}: {used}{there}; only one of the two is exact"
    said = f"{abs(gap):.2f} dB {'better' if gap > 0 else 'worse'}"
    return (
        f"{name} {what}: {used}{there}; the recommended {what} is "
        f"{'as good' if abs(gap) < 0.005 else said} in SQNR"
    )


def _cost(record: Record) -> str:
    cost = mse_cost(record)
    return f" - {cost}" if cost else ""


def _reasons(record: Record) -> list[str]:
    reasons = record["advice"].get("reasons") or []
    body = ["   Why:"] if reasons else []
    for reason in reasons:
        body += item(f"- {one_line(reason)}", 5)
    return body


def _score(record: Record, best: Level) -> str:
    score = number(best.get("score"))
    said = "-" if math.isnan(score) else f"{score:.4f}"
    return f"   Composite Score: {said} (candidates: {one_line(record['advice']['candidates'])})"


def _measures(best: Level) -> list[str]:
    body = [f"     - {each.label}: {_value(best, each.name)}" for each in METRICS.of("errors")]
    rest = rest_db(best)
    if not math.isnan(rest):
        body.insert(1, f"     - SQNR without massive elements: {decibel_text(rest)}")
    return body


def _spread(record: Record) -> list[str]:
    """Ranges and standard deviations over the levels."""
    stability = record["advice"]["stability"]
    body = [_range(record, name) for name in _SHOWN if name in stability]
    for name in ("mse", "cosine"):
        std = number(stability.get(name, {}).get("std"))
        if not math.isnan(std):
            body.append(f"{_brief(name)} Stability (std): {METRICS.get(name).text(std)}")
    return body


def _range(record: Record, name: str) -> str:
    """One metric's range; where levels are exact there is no end to it, and they are counted."""
    low, high = (number(record["advice"]["stability"][name].get(end)) for end in ("min", "max"))
    known, label = METRICS.get(name), _brief(name)
    if math.isnan(low) or math.isnan(high):
        return f"{label} Range: undefined"
    spec = ".2f" if known.logarithm else ".6f" if known.bounded else ".6e"
    unit = f" {known.unit}".rstrip()
    exact = sum(metric(level, name) == math.inf for level in record["levels"]) if unit else 0
    parts = []
    if math.isfinite(high - low):
        delta = f"Δ: {high - low:{spec}}{unit}"
        parts.append(f"{low:{spec}} to {high:{spec}}{unit} ({delta})")
    elif math.isfinite(low):
        parts.append(f"from {low:{spec}}{unit}")
    parts += [f"{counted(exact, 'level')} exact"] if exact else []
    return f"{label} Range: {', '.join(parts) or 'infinite'}"


def _stability(record: Record) -> list[str]:
    if len(record["levels"]) < 2:
        return ["📍 Only one level was tested: there is nothing to compare it with"]
    stability = record["advice"]["stability"]
    mse, cosine = stability.get("mse", {}), stability.get("cosine", {})
    span = stability.get("psnr_db", {}).get("range")
    body = [
        "✅ MSE is stable across the levels - scaling factor has minimal impact on it"
        if mse.get("stable")
        else "⚠️  MSE varies significantly with scaling - choose the recommended factor carefully",
        "✅ Cosine similarity is very stable - "
        "scaling factor has minimal impact on direction preservation"
        if cosine.get("stable")
        else "⚠️  Cosine similarity varies with scaling - far from the recommended factor "
        "directions change",
    ]
    words = {
        "small": "✅ Small PSNR range - scaling factor has limited impact on PSNR",
        "moderate": "📊 Moderate PSNR range - scaling factor has noticeable impact on PSNR",
        "large": "⚠️  Large PSNR range - scaling factor has critical impact on PSNR",
    }
    return body + ([words[span]] if span in words else [])


def _position(record: Record, best: Level) -> str:
    given = record["parameters"]["alignment"].endswith("given")
    position = record["advice"].get("position")
    if len(record["levels"]) < 2:
        return "📍 This is the only level tested"
    ends = [number(record["parameters"][end]) for end in ("min_exp", "max_exp")]
    if not min(ends) <= number(best["exponent"]) <= max(ends):
        return "📍 This is beyond the alignment ends: there this format's values are densest"
    if position not in ("maximum", "minimum"):
        return "📍 This is a balanced middle ground between overflow and underflow"
    end = f"the {position} {'exponent of the range' if given else 'alignment end'}"
    what = "overflow" if position == "maximum" else "underflow"
    count = int(best[what])
    share = share_text(best[f"{what}_share"])
    said = f"{share} of the elements {what} here" if count else f"nothing {what}s here"
    return f"📍 This is at {end}: {said}"


def advice_lines(record: Record) -> list[str]:
    """SCALING FACTOR ANALYSIS & RECOMMENDATIONS of a tensor sweep."""
    given = record["parameters"]
    ends = f"{exponent_text(given['min_exp'])} to {exponent_text(given['max_exp'])}"
    body = [
        *title("SCALING FACTOR ANALYSIS & RECOMMENDATIONS"),
        f"Format: {format_title(record)}",
        f"Tested {counted(len(record['levels']), 'scaling level')} from {ends}",
        *item(f"This sweep speaks about {one_line(record['advice']['speaks_about'])}"),
        THIN,
        *heading("INDIVIDUAL METRIC OPTIMA:"),
        *_optima(record, list(_BEST)),
        THIN,
        *heading("COMPOSITE RECOMMENDATION:"),
    ]
    best = recommended(record)
    if best is None:
        return [*body, "❌ No recommendation: no level could be measured", THICK]
    held = "" if best["e8m0"] else " - not an E8M0 scale"
    body += [
        f"⭐ RECOMMENDED Scaling Factor: {factor_text(best)}{held}{_cost(record)}",
        f"   Scale Exponent: {exponent_text(best['exponent'])}",
        *item(_score(record, best).strip(), 3),
        "   Balanced Performance:",
        *_measures(best),
        *_losses(best),
        *item(_gap(record, best), 3),
        *_reasons(record),
    ]
    body += [THIN, *heading("PERFORMANCE ANALYSIS:"), *_spread(record)]
    body += [THIN, *heading("RECOMMENDATIONS:"), *_stability(record)]
    body += [THIN, *heading("FINAL RECOMMENDATION:"), f"🎯 Use scaling factor: {factor_text(best)}"]
    if record.get("failed"):
        body.append("   for the finite values; the tensor itself does not pass")
    return [
        *body,
        f"   This provides the best balance of accuracy and stability for "
        f"{record['format']['name']} quantization",
        f"   Scale exponent: {exponent_text(best['exponent'])}",
        f"   {_position(record, best)}",
        THICK,
    ]


def block_advice_lines(record: Record) -> list[str]:
    """What a sweep of offsets says: whether to move the block exponents from where they are."""
    body = [
        *title("BLOCK OFFSET ANALYSIS & RECOMMENDATIONS"),
        *item(f"This sweep speaks about {one_line(record['advice']['speaks_about'])}"),
        THIN,
        *_optima(record, ["sqnr_db", "mse", "cosine"]),
        THIN,
    ]
    best = recommended(record)
    if best is None:
        return [*body, "❌ No recommendation: no offset could be measured", THICK]
    offset = offset_text(best["exponent"])
    return [
        *body,
        f"⭐ RECOMMENDED Offset: {offset} (every block scale times {factor_text(best)})"
        f"{_cost(record)}",
        *item(_score(record, best).strip(), 3),
        "   Balanced Performance:",
        *_measures(best),
        *_losses(best),
        *item(_gap(record, best), 3),
        *_reasons(record),
        THIN,
        f"🎯 Use offset: {offset}",
        THICK,
    ]
