"""The part of a sweep's text that tells what saturates and what is lost at the small end.

Underflow alone is no reason to avoid a level: what becomes zero can carry next to no energy. So the
levels to avoid are those with high overflow, and the recommended level is never among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from qgate.sweeps._text_parts import THICK, THIN, heading, item, title
from qgate.sweeps.record import (
    Level,
    Record,
    decibel_text,
    exponent_text,
    factor_text,
    level_at,
    metric,
    number,
    recommended,
    share_text,
)
from qgate.text import counted

_ISSUES_IN_FULL = 6
_MUCH_ENERGY = 0.01


def _issues(record: Record, kind: str) -> list[str]:
    """Every level with an issue: in full where they are few, a line each where they are many."""
    found = {*record["advice"][kind]["high"], *record["advice"][kind]["moderate"]}
    levels = [
        level
        for index, level in enumerate(record["levels"])
        if index in found or (kind == "overflow" and _costly(level))
    ]
    if len(levels) > _ISSUES_IN_FULL:
        return [_issue_in_brief(level, kind) for level in levels]
    return [line for level in levels for line in _issue_in_full(record, level, kind)]


def _costly(level: Level) -> bool:
    """Whether saturation takes much of the energy, be it from a handful of outliers."""
    return number(level["overflow_energy"]) > _MUCH_ENERGY


def _severity(level: Level, kind: str) -> str:
    grade = str(level["severity"][kind]).upper()
    hidden = kind == "overflow" and grade != "HIGH" and _costly(level)
    return f"{grade} by count, by energy HIGH" if hidden else grade


def _issue_in_brief(level: Level, kind: str) -> str:
    lost = "overflow" if kind == "overflow" else "flush"
    flushed = "" if kind == "overflow" else f", flushed {share_text(level['flush_share'])}"
    where = f"Scale Exp: {exponent_text(level['exponent'])}"
    counted = f"{level[kind]} ({share_text(level[f'{kind}_share'])}{flushed}"
    energy = f"energy {share_text(level[f'{lost}_energy'])})"
    return f"  {where:18} {counted}, {energy}, {_severity(level, kind)}"


def _issue_in_full(record: Record, level: Level, kind: str) -> list[str]:
    low, high = number(level["scaled_min"]), number(level["scaled_max"])
    counts = {
        what: f"{level[what]} ({share_text(level[f'{what}_share'])})"
        for what in ("overflow", "underflow", "flush")
    }
    limit = number(record["format"]["max" if kind == "overflow" else "min_normal"])
    body = [f"  Scale Exp: {exponent_text(level['exponent'])} (Factor: {factor_text(level)})"]
    if kind == "overflow":
        body += [
            f"    Overflow: {counts['overflow']}, {share_text(level['overflow_energy'])} of the "
            f"energy lost",
            f"    Max Normal: {limit:.2e}",
        ]
    else:
        body += [
            f"    Underflow: {counts['underflow']}",
            f"    Flush to Zero: {counts['flush']}, {share_text(level['flush_energy'])} of the "
            f"energy lost",
            f"    Min Normal: {limit:.2e}",
        ]
    return [
        *body,
        f"    Tensor Range: [{low:.2e}, {high:.2e}] after scaling",
        f"    Severity: {_severity(level, kind)}",
    ]


def _extremes(record: Record) -> list[str]:
    found = record["advice"]
    body = heading("OVERFLOW EXTREMES:")
    worst = level_at(record, found["overflow"].get("worst"))
    if worst is None:
        body.append("No level overflows")
    else:
        body += [
            f"Worst Overflow: Scale Exp {exponent_text(worst['exponent'])}",
            f"  {share_text(worst['overflow_share'])} overflow, "
            f"{share_text(worst['overflow_energy'])} of the energy lost",
        ]
    body += ["", *heading("UNDERFLOW EXTREMES:")]
    for what in ("worst", "best"):
        level = level_at(record, found["underflow"].get(what))
        if level is not None:
            body += [
                f"{what.capitalize()} Underflow: Scale Exp {exponent_text(level['exponent'])}",
                f"  {share_text(level['underflow_share'])} underflow, "
                f"{share_text(level['flush_share'])} flushed to zero, "
                f"{share_text(level['flush_energy'])} of the energy lost",
            ]
    return body if found["underflow"].get("worst") is not None else [*body, "No level underflows"]


def _span(levels: Sequence[Level]) -> str:
    first, last = (exponent_text(level["exponent"]) for level in (levels[0], levels[-1]))
    return f"Scale Exp {first}" if first == last else f"Scale Exp {first} to {last}"


def _here(best: Level, kind: str) -> str:
    lost = "overflow" if kind == "overflow" else "flush"
    flushed = "" if kind == "overflow" else f", {share_text(best['flush_share'])} flushed to zero"
    return (
        f"At the recommended Scale Exp {exponent_text(best['exponent'])}: "
        f"{share_text(best[f'{kind}_share'])} {kind}{flushed}, "
        f"{share_text(best[f'{lost}_energy'])} of the energy lost"
    )


def _clean(record: Record, best: Level) -> list[str]:
    """Levels without issues beside the recommended one, and why that need not be among them."""
    advice, levels = record["advice"], record["levels"]
    own = exponent_text(best["exponent"])
    sqnr = decibel_text(metric(best, "sqnr_db"))
    if advice.get("clean_range") is not None:
        first, last = advice["clean_range"]
        inside = levels[first : last + 1]
        there = decibel_text(max(metric(level, "sqnr_db") for level in inside))
        said = (
            f"the recommended Scale Exp {own} is among them"
            if first <= advice["recommended"] <= last
            else f"the recommended Scale Exp {own} is not: its SQNR is {sqnr}, "
            f"theirs {there} at most"
        )
        return item(
            f"✅ Without significant overflow or underflow, by count: {_span(inside)}; {said}",
            hang=3,
        )
    body = ["⚠️  All scaling levels have some overflow/underflow - choose least problematic"]
    index = advice.get("least_problematic")
    least = level_at(record, index)
    if least is None:
        return body
    shares = (
        f"Overflow: {share_text(least['overflow_share'])}, "
        f"Underflow: {share_text(least['underflow_share'])}"
    )
    if index == advice["recommended"]:
        return [
            *body,
            f"💡 Least problematic scaling: Scale Exp {own}, the recommended one",
            f"   {shares}",
        ]
    return [
        *body,
        f"💡 Smallest share of elements outside the range: Scale Exp "
        f"{exponent_text(least['exponent'])}",
        f"   {shares}, SQNR {decibel_text(metric(least, 'sqnr_db'))}",
        *item(
            f"Shares count elements, not error: the recommendation stays Scale Exp {own}, "
            f"SQNR {sqnr}",
            3,
        ),
    ]


def _advised(record: Record, best: Level) -> list[str]:
    advice, levels = record["advice"], record["levels"]
    body: list[str] = []
    chosen = advice["recommended"]
    high = [levels[index] for index in sorted(advice["overflow"]["high"]) if index != chosen]
    costly = [
        level
        for index, level in enumerate(levels)
        if _costly(level)
        and level not in high
        and index != chosen
        and number(level["metrics"]["sqnr_db"]) < number(best["metrics"]["sqnr_db"])
        and level["exponent"] < best["exponent"]
    ]
    is_high = best["severity"]["overflow"] == "high"
    if is_high and advice["candidates"].startswith("all"):
        body += [
            "⚠️  Every candidate has HIGH overflow severity - expect significant precision loss",
            "   A format with a larger range, or a larger scale, is the way out",
        ]
    elif is_high:
        body += [
            "🟡 The recommended level has HIGH overflow severity by count, and the least error",
            *item(_here(best, "overflow"), 3),
        ]
    elif high:
        body += [
            f"⚠️  AVOID scaling factors with HIGH overflow severity: {_span(high)}",
            "   These factors cause significant precision loss",
        ]
    if costly:
        least, most = (
            pick(number(level["overflow_energy"]) for level in costly) for pick in (min, max)
        )
        body += item(
            f"⚠️  AVOID {_span(costly)} too: few elements saturate there, but that takes "
            f"{share_text(least)} to {share_text(most)} of the energy",
            hang=4,
        )
    if any(level["overflow"] for level in levels):
        body += [
            "🔴 OVERFLOW WARNING:",
            "   Values beyond the limit will be saturated to max representable value",
            *item(_here(best, "overflow"), 3),
        ]
    if any(level["underflow"] for level in levels):
        body += [
            "🟡 UNDERFLOW CONSIDERATIONS:",
            "   Moderate underflow may be acceptable depending on use case",
            *item(_here(best, "underflow"), 3),
        ]
    return body + _clean(record, best)


def overflow_lines(record: Record) -> list[str]:
    """OVERFLOW/UNDERFLOW ANALYSIS SUMMARY of a tensor sweep."""
    levels = record["levels"]
    significant = sum(bool(level["significant"]) for level in levels)
    body = [
        *title("OVERFLOW/UNDERFLOW ANALYSIS SUMMARY"),
        f"Format: {record['format']['name']}",
        f"Analyzed {counted(len(levels), 'scaling level')}",
        f"Significant overflow/underflow detected in {counted(significant, 'level')}",
        THIN,
    ]
    if not levels:
        return [*body, "❌ No level could be measured: nothing is known about its losses", THICK]
    for kind, sign in (("overflow", "🔴"), ("underflow", "🟡")):
        issues = _issues(record, kind)
        if issues:
            body += [*heading(f"{sign} {kind.upper()} ISSUES:"), *issues, ""]
        else:
            body += [f"✅ No significant {kind}", ""]
    body += [*_extremes(record), THIN, *heading("OVERFLOW/UNDERFLOW RECOMMENDATIONS:")]
    best = recommended(record)
    return [*body, *(_advised(record, best) if best else []), THICK]
