"""Write a sweep in words for the console, the log and the results file.

Everything comes from the record of the sweep, so the same text can be written again later.

Underflow alone is no reason to avoid a level: what becomes zero can carry next to no energy. So the
levels to avoid are those with high overflow, and the recommended level is never among them.
All parts that advise recommend the same level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

from qgate.metrics import METRICS
from qgate.sweeps.record import (
    USUAL,
    LossKind,
    SweepRecord,
    SweepView,
    SweptLevel,
    energy,
    exponent_text,
    factor_text,
    metric,
    number,
    share,
    share_text,
    short,
    sqnr_without_massive,
)
from qgate.sweeps.tables import THICK, THIN, heading, item, level_rows, metric_tables, title
from qgate.text import counted, decibels, one_line, shortened

_PLAIN = {"Δ": "delta"}
_COLORS = (
    (re.compile(r"^This tensor does not pass|\bHIGH$"), "31"),
    (re.compile(r"^AVOID|\bMODERATE$"), "33"),
    (re.compile(r"^RECOMMENDED |^Use |^ *\d+/\d+ .*\brec\b"), "1;32"),
    (re.compile(r"^ *\d+/\d+ .*not E8M0"), "2"),
    (re.compile(r"^(MXFP )?(BLOCK )?SCALING (TEST|RESULTS): |^(?=.*[A-Z])[^a-z]+$"), "1"),
)
_USUAL = {"production": "Production", "amax": "amax / max", "cast": "Plain Cast", "own": "Own"}
_EXACT = ("maximum alignment, nothing overflows", "minimum alignment, nothing underflows")
_ENDS = {
    "exact": _EXACT,
    "documented": ("documented maximum alignment", "documented minimum alignment"),
    "given": ("as given", "as given"),
    "maximum given": ("as given", _EXACT[1]),
    "minimum given": (_EXACT[0], "as given"),
}

_MUCH_ENERGY = 0.01
_KINDS: tuple[LossKind, ...] = ("overflow", "underflow")

# The metrics whose best level is named in a sweep of blocks; in one of tensors it is all of them.
_BEST_OF_BLOCKS = ("sqnr_db", "mse", "cosine")
# The metrics that stand beside each of them, and whose spread over the levels is shown.
_SHOWN = ("sqnr_db", "mse", "cosine", "psnr_db")
_BESIDE_USUAL = {
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


def lines(record: SweepRecord, color: bool = False) -> list[str]:
    """Write the whole text of a sweep; only a long path is wider than 100 columns."""
    view = SweepView(record)
    failed = _failure(record)
    body = [*_title(view, "TEST"), *failed]
    body += [*(_origin if view.is_block else _input)(view), THIN, *_parameters(view)]
    body += [THIN, *level_rows(view), ""]
    if view.is_block:
        body += block_advice_lines(view)
    else:
        body += [*advice_lines(view), "", *overflow_lines(view)]
    body += failed
    return [_painted(line) for line in body] if color else body


def _title(view: SweepView, document: str) -> list[str]:
    name = f"{shortened(view.tensor['name'], 45)}, {view.format_title}"
    kind = "BLOCK SCALING" if view.is_block else "SCALING"
    return title(f"{'MXFP ' if view.prefix else ''}{kind} {document}: {name}")


def results_text(record: SweepRecord) -> str:
    """Write the results file: the input, the parameters, the versions, and every figure."""
    view, failed = SweepView(record), _failure(record)
    body = [*_title(view, "RESULTS"), *failed, *_input(view), THIN, *_parameters(view)]
    body += [THIN, *heading("VERSIONS:")]
    body += [f"  {name}: {one_line(version)}" for name, version in record["versions"].items()]
    body += [THIN, *heading("RECOMMENDATION:")]
    sqnr, reduced = decibels(metric(view.best, "sqnr_db"), 2), sqnr_without_massive(view.best)
    body.append(f"  {view.level_text(view.best)}, SQNR: {sqnr}")
    if not math.isnan(reduced):
        body.append(f"  SQNR without massive elements: {decibels(reduced, 2)}")
    return "\n".join([*body, THIN, *metric_tables(view), *failed]) + "\n"


def answer(source: str, record: SweepRecord) -> str:
    """Say in one line which scale is recommended, what it is worth and what it costs."""
    view = SweepView(record)
    exponent, gap = view.best["exponent"], view.gap_db
    scale = f"block offset {exponent:+g}" if view.is_block else f"scale 2^{exponent:g}"
    differs = math.isfinite(gap) and abs(gap) >= 0.005
    more = f", {gap:+.2f} dB against {USUAL[view.usual_kind]}" if differs else ""
    more += f"; {view.mse_cost}" if view.mse_cost else ""
    return f"  {one_line(source)}: {record['format']['name']} {scale}, {view.worth}{more}"


# Facts -------------------------------------------------------------------------------------------


def _failure(record: SweepRecord) -> list[str]:
    """Write, for beginning and end, that a tensor has values that no format holds."""
    if not record["failed"]:
        return []
    return [
        *item(f"This tensor does not pass: {one_line(record['failed'])}.", hang=3),
        "   All figures cover its finite values only; no scale repairs the others.",
    ]


def _dtype(view: SweepView) -> str:
    rounded = view.tensor["rounded_to"]
    return f"{view.tensor['dtype']}{f', rounded to {rounded} first' if rounded else ''}"


def _range(view: SweepView) -> str:
    return f"[{short(view.tensor['min'])}, {short(view.tensor['max'])}]"


def _input(view: SweepView) -> list[str]:
    """Write the figures of the input; its hash tells two tensors of one name apart."""
    tensor = view.tensor
    counts = []
    for key, label in (("zeros", "zeros"), ("nan", "NaN"), ("posinf", "+Inf"), ("neginf", "-Inf")):
        count = int(tensor[key])
        share = f" ({share_text(count / tensor['elements'])})" if count else ""
        counts.append(f"{label}: {count}{share}")
    return [
        *heading("INPUT TENSOR:"),
        f"  Name: {one_line(tensor['name'])}",
        f"  Path: {one_line(tensor['path']) if tensor['path'] else 'not from a file'}",
        f"  Shape: {list(tensor['shape'])}, {tensor['elements']} elements",
        f"  Dtype: {_dtype(view)}",
        f"  SHA-256: {tensor['sha256'] or '-'}",
        f"  Range: {_range(view)}",
        f"  Magnitudes: largest {short(tensor['amax'])}, smallest non-zero {short(tensor['amin'])}",
        f"  Mean: {short(tensor['mean'])}, Std: {short(tensor['std'])}",
        f"  Counts: {', '.join(counts)}",
    ]


def _origin(view: SweepView) -> list[str]:
    """Name the input in brief, for a sweep that follows another one of the same tensor."""
    tensor = view.tensor
    body = [f"  Input: {list(tensor['shape'])}, {_dtype(view)}, range {_range(view)}"]
    body += [f"  Path: {one_line(tensor['path'])}"] if tensor["path"] else []
    return body + ([f"  SHA-256: {tensor['sha256']}"] if tensor["sha256"] else [])


def _parameters(view: SweepView) -> list[str]:
    """Write the parameters, the format's figures and the exponent in use today."""
    parameters, fmt = view.parameters, view.format
    low = number(fmt["min_subnormal"])
    subnormal = f"smallest subnormal {short(low)}, " if low < number(fmt["min_normal"]) else ""
    body = [
        *heading("PARAMETERS:"),
        *item(
            f"Format: {view.format_title}, {fmt['bits']} bits, max {short(fmt['max'])}, "
            f"smallest normal {short(fmt['min_normal'])}, {subnormal}rounding {fmt['rounding']}",
            2,
        ),
    ]
    if view.usual_kind == "own":
        return body + item(
            f"Blocks: {parameters['block']} elements along axis {parameters['axis']}, "
            f"{parameters['scale_rule']}; the sweep multiplies all scales by the same factor. "
            "Offset 0 is the format's own rule.",
            2,
        )
    if view.is_block:
        return body + item(
            f"Blocks: {parameters['block']} elements along axis {parameters['axis']}; each keeps "
            f"its own shared exponent (scale rule {parameters['scale_rule']}) and the sweep adds "
            f"one offset to all of them. Offset 0 is what production uses.",
            2,
        )
    largest = 2 ** (int(parameters["scale_bits"]) - 1) - 1
    upper, lower = _ENDS[parameters["alignment"]]
    first, last = exponent_text(parameters["max_exp"]), exponent_text(parameters["min_exp"])
    levels = f"{len(view.levels)}, {parameters['levels']} asked for, and integers to the best"
    return [
        *body,
        f"  Scale Bits: {parameters['scale_bits']} (E8M0: integers from {-largest} to {largest})",
        *item(f"Scale Exponents: {first} ({upper}) to {last} ({lower})", 2),
        f"  Levels: {levels}",
        f"  {_USUAL[view.usual_kind]} Exponent: {exponent_text(view.usual_exponent)}",
    ]


# Terminals ---------------------------------------------------------------------------------------


def plain(texts: Iterable[str]) -> list[str]:
    """Write lines in ASCII, for terminals and files that cannot encode the signs."""
    plainer = []
    for text in texts:
        for sign, word in _PLAIN.items():
            text = text.replace(sign, word)
        plainer.append(text.encode("ascii", "backslashreplace").decode("ascii"))
    return plainer


def can_encode(stream: TextIO) -> bool:
    """Tell whether a stream can write the signs of these texts; one without an encoding can."""
    encoding = getattr(stream, "encoding", None)
    try:
        "".join(_PLAIN).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _painted(line: str) -> str:
    code = next((code for pattern, code in _COLORS if pattern.search(line)), None)
    return f"\x1b[{code}m{line}\x1b[0m" if code else line


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
    name, gap = _BESIDE_USUAL[view.usual_kind], view.gap_db
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
    body = [_metric_range(view, name) for name in _SHOWN]
    for name in ("mse", "cosine"):
        std = number(view.advice["stability"][name]["std"])
        if not math.isnan(std):
            body.append(f"{_list_name(name)} Stability (std): {METRICS.get(name).text(std)}")
    return body


def _metric_range(view: SweepView, name: str) -> str:
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
