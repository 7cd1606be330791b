"""The figures printed below the pictures of a sweep: of the tensor, the format, and the advice."""

from __future__ import annotations

import math

from qgate.sweeps.record import (
    USUAL,
    Level,
    Record,
    decibel_text,
    exponent_text,
    factor_text,
    format_title,
    metric,
    number,
    offset_text,
    recommended,
    share_text,
    short,
    usual_exponent,
    usual_gap,
    usual_kind,
    usual_level,
)
from qgate.text import brief, counted, shortened

_ENDS = {"exact": "exact alignment", "documented": "documented alignment"}


def tensor_box(record: Record) -> tuple[str, list[str]]:
    tensor = record["tensor"]
    low, high, least, most = (number(tensor[key]) for key in ("min", "max", "amin", "amax"))
    decades = f" ({math.log2(most / least):.1f} binades)" if 0 < least <= most < math.inf else ""
    rounded = f", rounded to {tensor['rounded_to']}" if tensor.get("rounded_to") else ""
    digest = str(tensor.get("sha256") or "-")
    return "Tensor", [
        f"{shortened(list(tensor['shape']), 30)} {tensor['dtype']}{rounded}, "
        f"{tensor['elements']} elements",
        f"range [{short(low)}, {short(high)}]",
        f"magnitudes {short(least)} to {short(most)}{decades}",
        f"mean {short(number(tensor['mean']))}, std {short(number(tensor['std']))}, "
        f"zeros {tensor['zeros']}, NaN {tensor['nan']}, "
        f"Inf {int(tensor['posinf']) + int(tensor['neginf'])}",
        f"SHA-256 {digest[:16]}{'...' if len(digest) > 16 else ''}",
    ]


def format_box(record: Record) -> tuple[str, list[str]]:
    fmt, given = record["format"], record["parameters"]
    most, normal = number(fmt["max"]), number(fmt["min_normal"])
    least = number(fmt.get("min_subnormal"))
    least = least if 0 < least <= normal else normal
    body = [
        f"{fmt['bits']} bits, largest value {short(most)} (exponent {fmt['max_exponent']})",
        f"smallest normal {short(normal)}, smallest value {short(least)}",
        f"{math.log2(most / least):.1f} binades, rounding {fmt['rounding']}",
    ]
    if record["kind"] == "block":
        rule = f"blocks of {given['block']} along axis {given['axis']}, {given['scale_rule']} rule"
        return f"Format {format_title(record)}", [*body, rule]
    ends = f"{exponent_text(given['min_exp'])} to {exponent_text(given['max_exp'])}"
    how = _ENDS.get(given["alignment"], "as given")
    levels = f"{counted(len(record['levels']), 'level')}, exponents {ends} ({how})"
    return f"Format {format_title(record)}", [*body, levels, f"scale of {given['scale_bits']} bits"]


def advice_box(record: Record) -> tuple[str, list[str]]:
    best = recommended(record)
    if best is None:
        return "No recommendation", ["no level could be measured"]
    block = record["kind"] == "block"
    name = offset_text if block else exponent_text
    held = "" if best["e8m0"] else ", not an E8M0 scale"
    gap, kind = usual_gap(record), usual_kind(record)
    cosine = metric(best, "cosine")
    used = f"{USUAL[kind]} {name(usual_exponent(record))}"
    if kind in best["marks"]:
        used += ": the same"
    elif abs(gap) < 0.005:
        used += ": equal in SQNR"
    elif math.isfinite(gap):
        used += f": recommended is {gap:+.2f} dB SQNR"
    elif usual_level(record) is None:
        used += ", not among the levels"
    what = f"offset {name(best['exponent'])}, factor " if block else ""
    return f"Recommended: {what}{factor_text(best)}{held}", [
        f"SQNR {decibel_text(metric(best, 'sqnr_db'))}, MSE {brief(metric(best, 'mse'))}, "
        f"cosine {'undefined' if math.isnan(cosine) else f'{cosine:.6f}'}",
        _lost(best, "overflow", "saturated"),
        _lost(best, "flush", "flushed to zero"),
        used,
    ]


def _lost(best: Level, kind: str, words: str) -> str:
    share, energy = share_text(best[f"{kind}_share"]), share_text(best[f"{kind}_energy"])
    return f"{words}: {best[kind]} ({share}), {energy} of the energy"
