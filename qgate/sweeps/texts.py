"""A sweep in words: what the console, the log and the results file say.

Everything comes from the record of the sweep, so the same text can be written later and elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TextIO

from qgate.sweeps._advice_texts import advice_lines, block_advice_lines
from qgate.sweeps._loss_texts import overflow_lines
from qgate.sweeps._text_parts import (
    THIN,
    failure,
    heading,
    input_lines,
    origin_lines,
    parameter_lines,
    title,
)
from qgate.sweeps.record import (
    USUAL,
    Record,
    asked_format,
    decibel_text,
    format_title,
    metric,
    mse_cost,
    place_text,
    recommended,
    rest_db,
    usual_gap,
    usual_kind,
    worth_text,
)
from qgate.sweeps.tables import level_rows, metric_tables
from qgate.text import one_line, shortened

_PLAIN = {
    "✅": "OK",
    "❌": "FAILED",
    "🎉": "***",
    "⚠️": "WARNING",
    "🔴": "!!",
    "🟡": "!",
    "⭐": "***",
    "🥇": "*",
    "🏆": "*",
    "🎯": "*",
    "📊": "*",
    "📏": "*",
    "📐": "*",
    "💡": "->",
    "📍": "->",
    "Δ": "delta",
}
_COLORS = (
    (re.compile(r"^❌|\bHIGH$"), "31"),
    (re.compile(r"^⚠️|\bMODERATE$"), "33"),
    (re.compile(r"^⭐|^🎯 Use|^ *\d+/\d+ .*\brec\b"), "1;32"),
    (re.compile(r"^ *\d+/\d+ .*not E8M0"), "2"),
    (re.compile(r"^(MXFP )?(BLOCK )?SCALING (TEST|RESULTS): |^(?=.*[A-Z])[^a-z]+$"), "1"),
)


def lines(record: Record, color: bool = False) -> list[str]:
    """All a sweep has to say, line by line; only a long path is wider than 100 columns."""
    name = f"{shortened(record['tensor']['name'], 50)}, {format_title(record)}"
    mx = _mx(record)
    if record["kind"] == "block":
        body = [*title(f"{mx}BLOCK SCALING TEST: {name}"), *failure(record)]
        body += [*origin_lines(record), THIN, *parameter_lines(record)]
        body += [THIN, *level_rows(record), "", *block_advice_lines(record)]
    else:
        body = [*title(f"{mx}SCALING TEST: {name}"), *failure(record)]
        body += [*input_lines(record), THIN, *parameter_lines(record)]
        body += [THIN, *level_rows(record), "", *advice_lines(record)]
        body += ["", *overflow_lines(record)]
    body += failure(record)
    return [_painted(line) for line in body] if color else body


def _mx(record: Record) -> str:
    return "MXFP " if asked_format(record).startswith("mx") else ""


def results_text(record: Record) -> str:
    """The results file: the input, the parameters, the versions, and every level's figures."""
    kind = "BLOCK SCALING" if record["kind"] == "block" else "SCALING"
    name = f"{shortened(record['tensor']['name'], 50)}, {format_title(record)}"
    body = [*title(f"{_mx(record)}{kind} RESULTS: {name}"), *failure(record)]
    body += [*input_lines(record), THIN, *parameter_lines(record), THIN, *heading("VERSIONS:")]
    body += [f"  {what}: {one_line(version)}" for what, version in record["versions"].items()]
    body += [THIN, *heading("RECOMMENDATION:")]
    best = recommended(record)
    if best is None:
        body.append("  none: no level could be measured")
    else:
        body.append(f"  {place_text(record, best)}, SQNR: {decibel_text(metric(best, 'sqnr_db'))}")
        if not math.isnan(rest_db(best)):
            body.append(f"  SQNR without massive elements: {decibel_text(rest_db(best))}")
    return "\n".join([*body, THIN, *metric_tables(record), *failure(record)]) + "\n"


def answer(source: str, record: Record) -> str:
    """One line for a summary: the recommended scale, what it is worth and what it costs."""
    level = recommended(record)
    if level is None:
        return f"  {one_line(source)}: no level could be measured"
    gap, cost = usual_gap(record), mse_cost(record)
    place = f"{level['exponent']:+g}" if record["kind"] == "block" else f"2^{level['exponent']:g}"
    what = "block offset" if record["kind"] == "block" else "scale"
    known = math.isfinite(gap) and abs(gap) >= 0.005
    more = f", {gap:+.2f} dB against {USUAL[usual_kind(record)]}" if known else ""
    more += f"; {cost}" if cost else ""
    name = f"{one_line(source)}: {record['format']['name']}"
    return f"  {name} {what} {place}, {worth_text(level)}{more}"


def plain(texts: Iterable[str]) -> list[str]:
    """The same lines in ASCII, for terminals and files that cannot encode the signs."""
    plainer = []
    for text in texts:
        for sign, word in _PLAIN.items():
            text = text.replace(sign, word)
        plainer.append(text.encode("ascii", "backslashreplace").decode("ascii"))
    return plainer


def can_encode(stream: TextIO) -> bool:
    """Whether a stream takes the signs of these texts; one that keeps text as text does."""
    encoding = getattr(stream, "encoding", None)
    if encoding is None:
        return True
    try:
        "".join(_PLAIN).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _painted(line: str) -> str:
    for pattern, code in _COLORS:
        if pattern.search(line):
            return f"\x1b[{code}m{line}\x1b[0m"
    return line
