"""Answer in a few lines which format and which scale to use, from the entries of a run."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from qgate.summaries.record import HIDDEN_DB
from qgate.sweeps.findings import EQUAL_DB, SweptFormat, findings
from qgate.sweeps.record import USUAL, FormatChoice, number, offset_text, scale_words, share_text
from qgate.text import counted, decibels, one_line

_MOST_TENSORS, _MOST_SWEEPS, _MOST_FAILED = 20, 8, 20
_EIGHT_BITS, _FOUR_BITS = 8, 4
_MUCH_DB = 3.0
"""What blocks with scales of their own gain where the advice names them, too."""


def answer_lines(
    entries: Sequence[SweptFormat],
    results: Sequence[tuple[str, str | None]],
    width: int,
    page: str,
) -> list[str]:
    """Write the answer for the console: what failed, the tensors, the advice, and the page."""
    bad = [(name, reason) for name, reason in results if reason]
    lines = [f"FAILED {one_line(name)}: {reason}" for name, reason in bad[:_MOST_FAILED]]
    if len(bad) > _MOST_FAILED:
        lines.append(f"and {len(bad) - _MOST_FAILED} more tensors that failed")
    tensors = _by_tensor(entries)
    if len(tensors) == 1:
        lines += _tensor_lines(tensors[0], width)
    else:
        lines += [line for own in tensors[:_MOST_TENSORS] for line in _brief_lines(own, width)]
        if len(tensors) > _MOST_TENSORS:
            lines.append(f"and {counted(len(tensors) - _MOST_TENSORS, 'more tensor')}, on the page")
    if tensors:
        lines += _wrapped("; ".join(filter(None, advice(entries))), width)
    return [*lines, *([page] if page else [])]


def headline(
    entries: Sequence[SweptFormat], results: Sequence[tuple[str, str | None]]
) -> tuple[str, str]:
    """Return the first line of the page, and its level: what failed, else what to use."""
    bad = [(name, reason) for name, reason in results if reason]
    if bad:
        name, reason = bad[0]
        return f"{counted(len(bad), 'tensor')} of {len(results)} failed: {name}: {reason}", "fail"
    tensors, level = _by_tensor(entries), findings(entries, results)[0].level
    if not tensors:
        return "Nothing was swept", ""
    only = f", in {tensors[0][0]['tensor']}" if len(tensors) == 1 else ""
    first = advice(entries)[0]
    return f"{first[:1].upper()}{first[1:]}{only}", level if level == "warn" else ""


def advice(entries: Sequence[SweptFormat]) -> tuple[str, str]:
    """Say what to use for the tensors that passed, and what it costs."""
    tensors = _by_tensor(entries)
    choices = [own[0].get("choices", []) for own in tensors]
    if len(tensors) == 1:
        return _advice_among(choices[0]) if choices[0] else _advice_of_scale(tensors[0])
    if all(choices):
        return _advice_of_most(choices), ""
    groups: dict[tuple[str, str], list[SweptFormat]] = {}
    for entry in (entry for own in tensors for entry in own):
        groups.setdefault((entry["format"], entry["kind"]), []).append(entry)
    ranked = sorted(groups.values(), key=lambda group: -min(map(_worth, group)))
    formats = len({name for name, kind in groups if kind == "tensor"})
    return "; ".join(map(_advice_of_group, ranked[: 1 if formats > 1 else 2])), ""


def _by_tensor(entries: Iterable[SweptFormat]) -> list[list[SweptFormat]]:
    """Group the entries of tensors that passed."""
    passed = [entry for entry in entries if not entry["failed"]]
    return [list(own) for _, own in groupby(passed, key=lambda entry: entry["folder"])]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, max(width, 40), initial_indent=indent, subsequent_indent=f"{indent}  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# Scales of a format -----------------------------------------------------------------------------


def _tensor_lines(entries: Sequence[SweptFormat], width: int) -> list[str]:
    """Write the table of one tensor: formats to choose from, or scales of those asked for."""
    first = entries[0]
    lines = _wrapped(f"{one_line(first['tensor'])}: {first['about']}", width)
    if choices := first.get("choices"):
        ratio = "SQNR without massive elements" if _is_reduced(choices) else "SQNR"
        return [*lines, *_columns([("format", "bits", "scale", ratio), *choice_rows(choices)])]
    rows = [("format", "scale", "SQNR")]
    names = {entry["format"] for entry in entries if entry["kind"] == first["kind"]}
    for entry in entries[:_MOST_SWEEPS]:
        rows.append((entry["format"], _scale_of(entry), decibels(entry["sqnr_db"], 2)))
        rows += _other_scales(entry) if len(names) == 1 else []
    left_out = len(entries) - _MOST_SWEEPS
    return [*lines, *_columns(rows), *([f"  and {left_out} more sweeps"] if left_out > 0 else [])]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align cells under their heads; those of the last column end at the right."""
    *widths, last = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  "
        + "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=True))
        + f"{row[-1]:>{last}}"
        for row in rows
    ]


def _other_scales(entry: SweptFormat) -> Iterator[tuple[str, str, str]]:
    """Yield the usual scale of a sweep, and the scales that one can use beside the recommended."""
    best, used, is_block = entry["exponent"], entry.get("used"), entry["kind"] == "block"
    ratios = {
        exponent: -10 * math.log10(error) if error else math.inf
        for exponent, error in entry.get("curve", ())
    }
    if used is not None and used != best:
        name = entry["usual"].removeprefix("the ")
        yield f"  {name}", _scale_text(used, is_block), decibels(entry["production_db"], 2)
    larger, smaller = float(math.floor(best + 1)), float(math.ceil(best - 1))
    if entry["usual"] == USUAL["own"]:  # any factor, not powers of two alone
        larger = min((other for other in ratios if other > best), default=math.inf)
        smaller = max((other for other in ratios if other < best), default=-math.inf)
    for exponent, name in ((larger, "  larger"), (smaller, "  smaller")):
        if exponent in ratios and exponent != used:
            yield name, _scale_text(exponent, is_block), decibels(ratios[exponent], 2)


def _scale_of(entry: SweptFormat) -> str:
    return _scale_text(entry["exponent"], entry["kind"] == "block")


def _scale_text(exponent: float, is_block: bool) -> str:
    if is_block:
        return f"blocks {exponent:+g}" if exponent else "blocks"
    return scale_words(exponent)


def _hides(sqnr_db: float, rest_db: float) -> bool:
    """Tell if massive elements hide what the others lose."""
    return sqnr_db - rest_db > HIDDEN_DB


def _worth(entry: SweptFormat) -> float:
    ratio, reduced = entry["sqnr_db"], entry["rest_db"]
    return reduced if _hides(ratio, reduced) else ratio


def _ratio_text(entry: SweptFormat) -> str:
    """Write the SQNR, and that without massive elements where these hide what the others lose."""
    ratio, reduced = (decibels(entry[name], 2) for name in ("sqnr_db", "rest_db"))
    is_hidden = _hides(entry["sqnr_db"], entry["rest_db"])
    return f"{ratio}, {reduced} without massive elements" if is_hidden else ratio


def _use(name: str, scale: str) -> str:
    """Write `use 2^-3 for int8`, `use scale 0.02916 for int8`, or the offset of blocks."""
    if not scale.startswith("blocks"):
        ends = scale.split(" to ")
        word = "" if all(end.startswith("2^") for end in ends) else "scale "
        return f"use {word.replace(' ', 's ') if len(ends) > 1 else word}{scale} for {name}"
    offset = scale.removeprefix("blocks").strip()
    word = "offsets" if " to " in offset else "offset"
    return f"use {name} with {f'{word} {offset} to ' if offset else ''}its blocks' scales"


def _advice_of_scale(entries: Sequence[SweptFormat]) -> tuple[str, str]:
    """Return the scale to use, of several formats for the best one, and what it costs."""
    best = max(entries, key=lambda own: -math.inf if math.isnan(_worth(own)) else _worth(own))
    formats = {own["format"] for own in entries if own["kind"] == entries[0]["kind"]}
    entry = entries[0] if len(formats) == 1 else best
    gap = entry["gap_db"]
    costs = []
    if math.isfinite(gap) and abs(gap) >= EQUAL_DB:
        than = f"{abs(gap):.2f} dB {'more' if gap > 0 else 'less'} than {entry['usual']}"
        is_power = entry["usual"] != "amax / max" or gap > 0
        costs.append(than if is_power else f"{than}, which is no power of two")
    for share, word in ((entry["overflow"], "saturate"), (entry["flush"], "become zero")):
        costs += [f"{share_text(share)} {word}"] if share else []
    if _worth(best) - _worth(entry) > _MUCH_DB:
        use = _use(best["format"], _scale_of(best))
        one = f"with one scale {_scale_of(entry)} is best for {entry['format']}"
        return f"{use}: SQNR {_ratio_text(best)}", ", ".join(
            [f"{one}: {_ratio_text(entry)}", *costs]
        )
    use = _use(entry["format"], _scale_of(entry))
    return f"{use}: SQNR {_ratio_text(entry)}", ", ".join(costs)


def _advice_of_group(entries: Sequence[SweptFormat]) -> str:
    """Say which scales to use of one format for several tensors."""
    low, high = (pick(entries, key=lambda own: own["exponent"]) for pick in (min, max))
    scales = list(dict.fromkeys(map(_scale_of, (low, high))))
    if len(scales) > 1 and low["kind"] == "block":
        scales = [f"blocks {offset_text(low['exponent'])}", offset_text(high["exponent"])]
    least = min(entries, key=_worth)
    use = _use(entries[0]["format"], " to ".join(scales))
    return f"{use}: SQNR lowest in {one_line(least['tensor'])}, {_ratio_text(least)}"


# Formats to choose from -------------------------------------------------------------------------


def _ranked(choices: Sequence[FormatChoice]) -> list[tuple[float, FormatChoice]]:
    """Return formats with their SQNR, the highest first.

    It is that without massive elements for all of them where these hide what one loses.
    """
    name = "rest_db" if _is_reduced(choices) else "sqnr_db"
    ratios = [(number(choice[name]), choice) for choice in choices]  # type: ignore[literal-required]
    return sorted(ratios, key=lambda pair: math.inf if math.isnan(pair[0]) else -round(pair[0], 2))


def _is_reduced(choices: Sequence[FormatChoice]) -> bool:
    return any(_hides(number(choice["sqnr_db"]), number(choice["rest_db"])) for choice in choices)


def choice_rows(choices: Sequence[FormatChoice]) -> list[tuple[str, str, str, str]]:
    """Return format, bits, scale and SQNR, the highest first."""
    return [
        (choice["format"], f"{choice['bits']:g}", choice["scale"], decibels(ratio, 2))
        for ratio, choice in _ranked(choices)
    ]


def _best_of(choices: Sequence[FormatChoice], bits: int) -> tuple[float, FormatChoice]:
    return next(pair for pair in _ranked(choices) if pair[1]["bits"] == bits)


def _advice_among(choices: Sequence[FormatChoice]) -> tuple[str, str]:
    (ratio, best), (least, small) = (_best_of(choices, bits) for bits in (_EIGHT_BITS, _FOUR_BITS))
    without = " without massive elements" if _is_reduced(choices) else ""
    use = _use(best["format"], best["scale"])
    return (
        f"{use}: SQNR {decibels(ratio, 2)}{without}",
        f"of 4 bits {small['format']}, {decibels(least, 2)}",
    )


def _advice_of_most(of_tensors: Sequence[Sequence[FormatChoice]]) -> str:
    """Name the formats that are best for the most tensors, if one is for more than half."""
    counts, small_counts = (
        Counter(_best_of(choices, bits)[1]["format"] for choices in of_tensors).most_common()
        for bits in (_EIGHT_BITS, _FOUR_BITS)
    )
    (name, count), (small, few) = counts[0], small_counts[0]
    if 2 * count <= len(of_tensors):
        eight = " and ".join(f"{format} in {count}" for format, count in counts[:2])
        return (
            f"no format is best for most of {len(of_tensors)} tensors: of 8 bits {eight}; "
            f"of 4 bits {small}, in {few}"
        )
    return (
        f"use {name}, with the highest SQNR of 8 bits in {count} of {len(of_tensors)} tensors; "
        f"of 4 bits {small}, in {few}"
    )


def _brief_lines(entries: Sequence[SweptFormat], width: int) -> list[str]:
    """Write one of several tensors in one line, on a narrow console in a few."""
    name = one_line(entries[0]["tensor"])
    if choices := entries[0].get("choices"):
        parts = [
            f"{choice['format']} {choice['scale']} {decibels(ratio, 2)}"
            for ratio, choice in (_best_of(choices, bits) for bits in (_EIGHT_BITS, _FOUR_BITS))
        ]
    else:
        parts = [
            f"{entry['format']} {_scale_of(entry)} {_ratio_text(entry)}"
            for entry in entries[:_MOST_SWEEPS]
        ]
    return _wrapped(f"{name}: {', '.join(parts)}", width)
