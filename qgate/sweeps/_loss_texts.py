"""Write the part of a sweep's text about saturation and underflow.

Underflow alone is no reason to avoid a level: what becomes zero can carry next to no energy. So the
levels to avoid are those with high overflow, and the recommended level is never among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.sweeps.record import (
    LossKind,
    SweepView,
    SweptLevel,
    energy,
    factor_text,
    metric,
    number,
    share,
    share_text,
)
from qgate.sweeps.tables import THICK, THIN, heading, item, title
from qgate.text import counted, decibels

_MUCH_ENERGY = 0.01
_KINDS: tuple[LossKind, ...] = ("overflow", "underflow")


def overflow_lines(view: SweepView) -> list[str]:
    """Write OVERFLOW/UNDERFLOW ANALYSIS SUMMARY of a tensor sweep."""
    levels = view.levels
    significant = sum(bool(level["significant"]) for level in levels)
    body = [
        *title("OVERFLOW/UNDERFLOW ANALYSIS SUMMARY"),
        f"Format: {view.format['name']}",
        f"Analyzed {counted(len(levels), 'scaling level')}",
        f"Significant overflow/underflow detected in {counted(significant, 'level')}",
        THIN,
    ]
    for kind in _KINDS:
        issues = _issues(view, kind)
        heads = heading(f"{kind.upper()} ISSUES:") if issues else []
        body += [*heads, *(issues or [f"No significant {kind}"]), ""]
    body += [*_extremes(view), THIN, *heading("OVERFLOW/UNDERFLOW RECOMMENDATIONS:")]
    return [*body, *_avoided(view), *_warnings(view), *_clean(view), THICK]


def _is_costly(level: SweptLevel) -> bool:
    """Tell whether saturation takes much of the energy, even if only of a few outliers."""
    return number(level["overflow_energy"]) > _MUCH_ENERGY


def _issues(view: SweepView, kind: LossKind) -> list[str]:
    """Write the figures of every level with an issue."""
    graded = {*view.advice[kind]["high"], *view.advice[kind]["moderate"]}
    body: list[str] = []
    for index, level in enumerate(view.levels):
        if index in graded or (kind == "overflow" and _is_costly(level)):
            body += _issue(view, level, kind)
    return body


def _severity(level: SweptLevel, kind: str) -> str:
    grade = str(level["severity"][kind]).upper()
    hidden = kind == "overflow" and grade != "HIGH" and _is_costly(level)
    return f"{grade} by count, by energy HIGH" if hidden else grade


def _issue(view: SweepView, level: SweptLevel, kind: str) -> list[str]:
    lost = f"{energy(level, kind)} of the energy lost"
    counts = {
        loss: f"{level[loss]} ({share(level, loss)})" for loss in ("overflow", "underflow", "flush")
    }
    if kind == "overflow":
        losses = [f"    Overflow: {counts['overflow']}, {lost}"]
        limit = f"Max Normal: {number(view.format['max']):.2e}"
    else:
        losses = [f"    Underflow: {counts['underflow']}"]
        losses += [f"    Flush to Zero: {counts['flush']}, {lost}"]
        limit = f"Min Normal: {number(view.format['min_normal']):.2e}"
    return [
        f"  Scale Exp: {view.at(level)} (Factor: {factor_text(level)})",
        *losses,
        f"    {limit}",
        f"    Tensor Range: {_ranges(level)}",
        f"    Severity: {_severity(level, kind)}",
    ]


def _ranges(level: SweptLevel) -> str:
    """Write the range of the tensor after scaling, and that after rounding to the format."""
    texts = []
    for word in ("scaled", "rounded"):
        low, high = (number(level.get(f"{word}_{end}")) for end in ("min", "max"))
        if not math.isnan(low):  # records of earlier versions have no rounded range
            texts.append(f"[{low:.2e}, {high:.2e}] {word}")
    return ", ".join(texts)


def _losses(level: SweptLevel, kind: str) -> str:
    flushed = "" if kind == "overflow" else f", {share(level, 'flush')} flushed to zero"
    return f"{share(level, kind)} {kind}{flushed}, {energy(level, kind)} of the energy lost"


def _extremes(view: SweepView) -> list[str]:
    body: list[str] = []
    for kind in _KINDS:
        body += ["", *heading(f"{kind.upper()} EXTREMES:")]
        losses = view.advice[kind]
        extremes = {"worst": losses["worst"]}
        if kind == "underflow":
            extremes["best"] = losses["best"]
        for word, index in extremes.items():
            if index is not None:
                level = view.levels[index]
                body.append(f"{word.capitalize()} {kind.capitalize()}: Scale Exp {view.at(level)}")
                body.append(f"  {_losses(level, kind)}")
        body += [f"No level {kind}s"] if losses["worst"] is None else []
    return body[1:]


def _span(view: SweepView, levels: Sequence[SweptLevel]) -> str:
    first, last = view.at(levels[0]), view.at(levels[-1])
    return f"Scale Exp {first}" if first == last else f"Scale Exp {first} to {last}"


def _at_best(view: SweepView, kind: str) -> list[str]:
    best = view.best
    return item(f"At the recommended Scale Exp {view.at(best)}: {_losses(best, kind)}", 3)


def _avoided(view: SweepView) -> list[str]:
    """Name the levels to avoid, by count and by energy."""
    best, body = view.best, []
    sqnr = metric(best, "sqnr_db")
    alternatives = [level for level in view.levels if level is not best]
    high = [level for level in alternatives if level["severity"]["overflow"] == "high"]
    if best["severity"]["overflow"] == "high" and view.advice["candidates"].startswith("all"):
        body += [
            "Every candidate has HIGH overflow severity - expect significant precision loss",
            "   A format with a larger range, or a larger scale, is the way out",
        ]
    elif best["severity"]["overflow"] == "high":
        body += [
            "The recommended level has HIGH overflow severity by count, and the least error",
            *_at_best(view, "overflow"),
        ]
    elif high:
        body += [
            f"AVOID scaling factors with HIGH overflow severity: {_span(view, high)}",
            "   These factors cause significant precision loss",
        ]
    costly = [
        level
        for level in alternatives
        if _is_costly(level)
        and level not in high
        and metric(level, "sqnr_db") < sqnr
        and level["exponent"] < best["exponent"]
    ]
    if costly:
        least, most = (pick(number(x["overflow_energy"]) for x in costly) for pick in (min, max))
        body += item(
            f"AVOID {_span(view, costly)} too: few elements saturate there, but that takes "
            f"{share_text(least)} to {share_text(most)} of the energy",
            hang=4,
        )
    return body


def _warnings(view: SweepView) -> list[str]:
    body: list[str] = []
    if any(level["overflow"] for level in view.levels):
        body += [
            "OVERFLOW WARNING:",
            "   Values beyond the limit will be saturated to max representable value",
            *_at_best(view, "overflow"),
        ]
    if any(level["underflow"] for level in view.levels):
        body += [
            "UNDERFLOW CONSIDERATIONS:",
            "   Moderate underflow may be acceptable depending on use case",
            *_at_best(view, "underflow"),
        ]
    return body


def _clean(view: SweepView) -> list[str]:
    """Name levels without issues; the recommended one need not be among them."""
    advice, levels, own = view.advice, view.levels, view.at(view.best)
    sqnr = decibels(metric(view.best, "sqnr_db"), 2)
    if advice["clean_range"] is not None:
        first, last = advice["clean_range"]
        inside = levels[first : last + 1]
        highest = decibels(max(metric(level, "sqnr_db") for level in inside), 2)
        comparison = f"is not: its SQNR is {sqnr}, theirs {highest} at most"
        comparison = "is among them" if first <= advice["recommended"] <= last else comparison
        return item(
            f"Without significant overflow or underflow, by count: {_span(view, inside)}; "
            f"the recommended Scale Exp {own} {comparison}",
            hang=3,
        )
    body = ["All scaling levels have some overflow/underflow - choose least problematic"]
    least = levels[advice["least_problematic"] or 0]
    shares = f"Overflow: {share(least, 'overflow')}, Underflow: {share(least, 'underflow')}"
    if least is view.best:
        body.append(f"Least problematic scaling: Scale Exp {own}, the recommended one")
        return [*body, f"   {shares}"]
    return [
        *body,
        f"Smallest share of elements outside the range: Scale Exp {view.at(least)}",
        f"   {shares}, SQNR {decibels(metric(least, 'sqnr_db'), 2)}",
        *item(
            f"Shares count elements, not error: the recommendation stays Scale Exp {own}, "
            f"SQNR {sqnr}",
            3,
        ),
    ]
