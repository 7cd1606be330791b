"""Write a sweep in words for the console, the log and the results file.

Everything comes from the record of the sweep, so the same text can be written again later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TextIO

from qgate.sweeps._advice_texts import advice_lines, block_advice_lines
from qgate.sweeps._loss_texts import overflow_lines
from qgate.sweeps.record import (
    USUAL,
    SweepRecord,
    SweepView,
    exponent_text,
    metric,
    number,
    share_text,
    short,
    sqnr_without_massive,
)
from qgate.sweeps.tables import THIN, heading, item, level_rows, metric_tables, title
from qgate.text import decibels, one_line, shortened

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
