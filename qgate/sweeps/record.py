"""Reads the record of a sweep: numbers that JSON cannot hold, and how levels are written out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qgate.summaries.record import HIDDEN_DB

COSTLY_DB = 0.1
MX_PREFIX = "mxfp_"
Record = Mapping[str, Any]
Level = Mapping[str, Any]


def number(value: object) -> float:
    """A number of the record; "inf", "-inf", "nan" are texts there, and null means undefined."""
    if isinstance(value, int | float | str):
        return float(value)
    return math.nan


def metric(level: Level, name: str) -> float:
    return number(level["metrics"].get(name))


def rest_db(level: Level) -> float:
    """The SQNR without massive elements; NaN of levels that it was not taken at."""
    return number(level.get("sqnr_db_without_massive"))


def worth_text(level: Level) -> str:
    """Say in a few words what a level keeps; without massive elements where they hide it."""
    ratio, rest = metric(level, "sqnr_db"), rest_db(level)
    text = "exact" if ratio == math.inf else f"SQNR {ratio:.2f} dB"
    if math.isnan(ratio):
        return "NaN"
    hidden = ratio - rest > HIDDEN_DB
    return text + (f", {rest:.2f} dB without massive elements" if hidden else "")


def level_at(record: Record, index: int | None) -> Level | None:
    """The level an advice points to; None where it points to none."""
    levels: Sequence[Level] = record["levels"]
    return None if index is None else levels[index]


def recommended(record: Record) -> Level | None:
    return level_at(record, record["advice"].get("recommended"))


def marked(record: Record, mark: str) -> Level | None:
    """The level that carries a mark such as "production"."""
    return next((level for level in record["levels"] if mark in level["marks"]), None)


USUAL = {"production": "production", "amax": "amax / max", "cast": "the plain cast"}
"""The scale that a format is used with today, in words."""


def usual_kind(record: Record) -> str:
    """One of `USUAL`; records that do not tell are of the time when all had production."""
    usual = record["parameters"].get("usual")
    return str(usual["kind"]) if usual else "production"


def usual_exponent(record: Record) -> float:
    given = record["parameters"]
    return number((given.get("usual") or {"exponent": given.get("production")})["exponent"])


def usual_level(record: Record) -> Level | None:
    return marked(record, usual_kind(record))


def usual_gap(record: Record) -> float:
    """SQNR of the recommended level less that of the usual one."""
    advice = record["advice"]
    return number(advice.get("usual_gap_db", advice.get("production_gap_db")))


def mse_cost(record: Record) -> str:
    """Say what the recommended level costs against the best MSE; empty where that is little."""
    cost = number(record["advice"].get("mse_cost_db"))
    finest = level_at(record, record["advice"].get("best_mse"))
    if finest is None or not cost > COSTLY_DB:
        return ""
    place = offset_text(finest["exponent"])
    place = place if record["kind"] == "block" else f"2^{exponent_text(finest['exponent'])}"
    much = f"{cost:.2f} dB more than" if math.isfinite(cost) else "an error, unlike"
    return f"{much} the best MSE, at {place}"


def asked_format(record: Record) -> str:
    """The format that was asked for: `int8` where a block sweep is about `mxint8`."""
    fmt = record["format"]
    return str(fmt.get("asked", fmt["name"]))


def file_stem(record: Record, what: str) -> str:
    """The name of a sweep's files, without an ending; those of MX formats start with mxfp."""
    name = asked_format(record)
    return f"{MX_PREFIX if name.startswith('mx') else ''}{what}_{name}"


def format_title(record: Record) -> str:
    """`fp8_e4m3 (e4m3)`: the name with the layout it really has."""
    name, layout = record["format"]["name"], str(record["format"]["layout"])
    parts = re.fullmatch(r"1-([1-9]\d*)-(\d+)", layout)
    return f"{name} (e{parts[1]}m{parts[2]})" if parts else f"{name} ({layout})"


def short(value: float) -> str:
    """A figure in a few characters, exact where those suffice."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    exact = repr(value).removesuffix(".0")
    return "0" if value == 0 else exact if len(exact) <= 9 else f"{value:.4g}"


def exponent_text(value: object) -> str:
    """`-120` or `0.25`: what is no integer shows it."""
    exponent = number(value)
    if not math.isfinite(exponent):
        return str(exponent)
    text = f"{exponent:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def factor_text(level: Level) -> str:
    """`2^-120 (7.5e-37)`: the exponent always, since six decimals of a factor may show zeros."""
    power = f"2^{exponent_text(level['exponent'])}"
    factor = number(level["factor"])
    if not 0 < factor < math.inf:
        return power
    exact = repr(factor).removesuffix(".0")
    return f"{power} ({exact if len(exact) <= 6 else f'{factor:.2g}'})"


def offset_text(value: object) -> str:
    """`+1`, `0`, `-2`: the sign says which way the block exponents move."""
    text = exponent_text(value)
    return text if number(value) <= 0 else f"+{text}"


def share_text(value: object) -> str:
    """A share in percent; one that is not zero never reads as zero."""
    percent = number(value) * 100
    if percent != 0 and abs(percent) < 0.005:
        return f"{percent:.2g}%"
    return ">99.99%" if 99.995 <= percent < 100 else f"{percent:.2f}%"


def decibel_text(value: object) -> str:
    """A ratio in decibels; an infinite one is said in a word, for then there is no error."""
    ratio = number(value)
    if math.isnan(ratio):
        return "undefined"
    return "exact" if ratio == math.inf else f"{ratio:.2f} dB"


def place_text(record: Record, level: Level) -> str:
    """Where a level stands: its exponent or offset, its factor, and whether a scale can hold it."""
    if record["kind"] == "block":
        return f"Offset = {offset_text(level['exponent'])}, Factor = {factor_text(level)}"
    held = "" if level["e8m0"] else ", not an E8M0 scale"
    exponent = exponent_text(level["exponent"])
    return f"Scale Exp = {exponent}, Factor = {factor_text(level)}{held}"
