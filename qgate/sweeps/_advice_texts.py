"""Write the parts of a sweep's text that advise; all of them recommend the same level.

Other levels are named as facts (the best in one metric, the least overflow) and never recommended:
two pieces of advice that contradict each other are worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from qgate.metrics import METRICS
from qgate.sweeps.record import (
    SweepView,
    SweptLevel,
    energy,
    exponent_text,
    factor_text,
    metric,
    number,
    share,
    sqnr_without_massive,
)
from qgate.sweeps.tables import THICK, THIN, heading, item, title
from qgate.text import counted, decibels, one_line

# The metrics whose best level is named in a sweep of blocks; in one of tensors it is all of them.
_BEST_OF_BLOCKS = ("sqnr_db", "mse", "cosine")
# The metrics that stand beside each of them, and whose spread over the levels is shown.
_SHOWN = ("sqnr_db", "mse", "cosine", "psnr_db")
_USUAL = {
    "production": "Production",
    "amax": "amax / max",
    "cast": "Plain cast",
    "own": "The format's rule",
}
_PSNR_RANGES = {
    "small": "Small PSNR range - scaling factor has limited impact on PSNR",
    "moderate": "Moderate PSNR range - scaling factor has noticeable impact on PSNR",
    "large": "Large PSNR range - scaling factor has critical impact on PSNR",
}


def advice_lines(view: SweepView) -> list[str]:
    """Write SCALING FACTOR ANALYSIS & RECOMMENDATIONS of a tensor sweep."""
    parameters, best = view.parameters, view.best
    ends = f"{exponent_text(parameters['min_exp'])} to {exponent_text(parameters['max_exp'])}"
    unfit = f" - {view.unfit}" if view.unfit else ""
    body = [
        *title("SCALING FACTOR ANALYSIS & RECOMMENDATIONS"),
        f"Format: {view.format_title}",
        f"Tested {counted(len(view.levels), 'scaling level')} from {ends}",
        *item(f"This sweep speaks about {one_line(view.advice['speaks_about'])}"),
        THIN,
        *heading("INDIVIDUAL METRIC OPTIMA:"),
        *_optima(view, view.advice["best"]),
        THIN,
        *heading("COMPOSITE RECOMMENDATION:"),
        f"RECOMMENDED Scaling Factor: {factor_text(best)}{unfit}{_cost(view)}",
        f"   Scale Exponent: {view.at(best)}",
        *_composite(view),
        THIN,
        *heading("PERFORMANCE ANALYSIS:"),
        *_spread(view),
        THIN,
        *heading("RECOMMENDATIONS:"),
        *_stability(view),
        THIN,
        *heading("FINAL RECOMMENDATION:"),
        f"Use scaling factor: {factor_text(best)}",
    ]
    if view.record["failed"]:
        body.append("   for the finite values; the tensor itself does not pass")
    return [
        *body,
        f"   This provides the best balance of accuracy and stability for "
        f"{view.format['name']} quantization",
        f"   Scale exponent: {view.at(best)}",
        f"   {_position(view)}",
        THICK,
    ]


def block_advice_lines(view: SweepView) -> list[str]:
    """Say whether to move the exponents of blocks from where they are."""
    offset = view.at(view.best)
    return [
        *title("BLOCK OFFSET ANALYSIS & RECOMMENDATIONS"),
        *item(f"This sweep speaks about {one_line(view.advice['speaks_about'])}"),
        THIN,
        *_optima(view, _BEST_OF_BLOCKS),
        THIN,
        f"RECOMMENDED Offset: {offset} (every block scale times {factor_text(view.best)})"
        f"{_cost(view)}",
        *_composite(view),
        THIN,
        f"Use offset: {offset}",
        THICK,
    ]


def _text(level: SweptLevel, name: str) -> str:
    return METRICS.get(name).text(metric(level, name))


def _list_name(name: str) -> str:
    """Name a metric within a list: `MSE`, `Cosine`."""
    definition = METRICS.get(name)
    return definition.short.capitalize() if definition.bounded else definition.label


def _optima(view: SweepView, names: Iterable[str]) -> list[str]:
    body = []
    for name in names:
        level = view.levels[view.advice["best"][name]]
        pointer = " <- recommended" if level is view.best else ""
        label = METRICS.get(name).label
        body.append(f"Best {label}: {view.level_text(level)}{pointer}")
        beside = dict.fromkeys([*_SHOWN, name])
        body.append("    " + ", ".join(f"{_list_name(key)}: {_text(level, key)}" for key in beside))
    return body


def _cost(view: SweepView) -> str:
    return f" - {view.mse_cost}" if view.mse_cost else ""


def _composite(view: SweepView) -> list[str]:
    """Write the accuracy and the losses of the recommended level, and the reasons for it."""
    best = view.best
    score = number(best["score"])
    text = "-" if math.isnan(score) else f"{score:.4f}"
    errors = METRICS.of("errors")
    measures = [f"     - {error.label}: {_text(best, error.name)}" for error in errors]
    if not math.isnan(sqnr_without_massive(best)):
        sqnr = decibels(sqnr_without_massive(best), 2)
        measures.insert(1, f"     - SQNR without massive elements: {sqnr}")
    body = [
        *item(f"Composite Score: {text} (candidates: {one_line(view.advice['candidates'])})", 3),
        "   Balanced Performance:",
        *measures,
    ]
    for kind, label in (("overflow", "Overflow"), ("flush", "Flush to Zero")):
        body.append(
            f"     - {label}: {best[kind]} ({share(best, kind)} of elements, "
            f"{energy(best, kind)} of the energy)"
        )
    body += item(_against_usual(view), 3)
    reasons = view.advice["reasons"]
    body += ["   Why:"] if reasons else []
    return body + [line for reason in reasons for line in item(f"- {one_line(reason)}", 5)]


def _against_usual(view: SweepView) -> str:
    """Compare the recommended level with the one in use."""
    name, gap = _USUAL[view.usual_kind], view.gap_db
    if view.usual_kind in view.best["marks"]:
        return f"{name} uses this {view.word} already"
    sqnr = f", SQNR {decibels(metric(view.usual, 'sqnr_db'), 2)}" if view.usual else ""
    text = f"{name} {view.word}: {view.exponent(view.usual_exponent)}"
    if math.isnan(gap):
        return f"{text}{sqnr or ', not among the levels'}"
    if math.isinf(gap):
        return f"{text}{sqnr}; only one of the two is exact"
    grade = f"{abs(gap):.2f} dB {'better' if gap > 0 else 'worse'}"
    grade = "as good" if abs(gap) < 0.005 else grade
    return f"{text}{sqnr}; the recommended {view.word} is {grade} in SQNR"


def _spread(view: SweepView) -> list[str]:
    """Write ranges and standard deviations over the levels."""
    body = [_range(view, name) for name in _SHOWN]
    for name in ("mse", "cosine"):
        std = number(view.advice["stability"][name]["std"])
        if not math.isnan(std):
            body.append(f"{_list_name(name)} Stability (std): {METRICS.get(name).text(std)}")
    return body


def _range(view: SweepView, name: str) -> str:
    """Write one metric's range; exact levels, at which a ratio is infinite, are counted."""
    low, high = (number(view.advice["stability"][name][end]) for end in ("min", "max"))
    definition, label = METRICS.get(name), _list_name(name)
    if math.isnan(low) or math.isnan(high):
        return f"{label} Range: undefined"
    spec = ".2f" if definition.logarithm else ".6f" if definition.bounded else ".6e"
    unit = f" {definition.unit}".rstrip()
    exact = sum(metric(level, name) == math.inf for level in view.levels) if unit else 0
    parts = []
    if math.isfinite(high - low):
        parts.append(f"{low:{spec}} to {high:{spec}}{unit} (Δ: {high - low:{spec}}{unit})")
    elif math.isfinite(low):
        parts.append(f"from {low:{spec}}{unit}")
    parts += [f"{counted(exact, 'level')} exact"] if exact else []
    return f"{label} Range: {', '.join(parts) or 'infinite'}"


def _stability(view: SweepView) -> list[str]:
    if len(view.levels) < 2:
        return ["Only one level was tested: there is nothing to compare it with"]
    stability = view.advice["stability"]
    return [
        "MSE is stable across the levels - scaling factor has minimal impact on it"
        if stability["mse"]["stable"]
        else "MSE varies significantly with scaling - choose the recommended factor carefully",
        "Cosine similarity is very stable - "
        "scaling factor has minimal impact on direction preservation"
        if stability["cosine"]["stable"]
        else "Cosine similarity varies with scaling - far from the recommended factor "
        "directions change",
        _PSNR_RANGES[stability["psnr_db"]["range"]],
    ]


def _position(view: SweepView) -> str:
    parameters, best, position = view.parameters, view.best, view.advice["position"]
    if len(view.levels) < 2:
        return "This is the only level tested"
    ends = [number(parameters[end]) for end in ("min_exp", "max_exp")]
    if not min(ends) <= number(best["exponent"]) <= max(ends):
        return "This is beyond the alignment ends: there this format's values are densest"
    if position == "between":
        return "This is a balanced middle ground between overflow and underflow"
    is_custom = parameters["alignment"].endswith("given")
    end = f"the {position} {'exponent of the range' if is_custom else 'alignment end'}"
    kind = "overflow" if position == "maximum" else "underflow"
    lost = f"{share(best, kind)} of the elements {kind} here"
    return f"This is at {end}: {lost if best[kind] else f'nothing {kind}s here'}"
