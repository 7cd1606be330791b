"""Record of a sweep, and the figures and words that its texts, tables and pictures share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

from qgate.summaries.record import HIDDEN_DB

COSTLY_DB = 0.1
MX_PREFIX = "mxfp_"
_MX_NAMES = ("mx", "fp8_", "fp6_", "fp4_")
USUAL = {
    "production": "production", "amax": "amax / max", "cast": "the plain cast",
    "own": "the format's own rule",
}  # fmt: skip
"""Words for the scale that a format is used with today."""
LossKind = Literal["overflow", "underflow"]
SweptLevel = dict[str, Any]


class UsualScale(TypedDict):
    kind: str
    exponent: float


class SweepParameters(TypedDict):
    """Parameters of a sweep, and the scale in use today."""

    levels: int
    max_exp: float
    min_exp: float
    alignment: str
    scale_bits: int
    usual: UsualScale
    production: int | None
    block: int | None
    axis: int | None
    scale_rule: str | None


class LossLevels(TypedDict):
    """Levels that lose much at one end of a format, by their index."""

    high: list[int]
    moderate: list[int]
    worst: int | None
    best: NotRequired[int | None]


class MetricSpread(TypedDict):
    """Range of one metric over the levels, with its grade."""

    min: float
    max: float
    std: float
    range: NotRequired[str]
    stable: NotRequired[bool]


class SweepAdvice(TypedDict):
    """Advice made from the levels, which are named by their index."""

    best: dict[str, int]
    recommended: int
    position: str | None
    candidates: str
    stability: dict[str, MetricSpread]
    overflow: LossLevels
    underflow: LossLevels
    clean_range: list[int] | None
    least_problematic: int | None
    usual_gap_db: float | None
    best_mse: int
    mse_cost_db: float
    speaks_about: str
    reasons: list[str]
    power: NotRequired[int]
    """The level to use where scales are powers of two; absent in records of earlier versions."""
    massive: NotRequired[dict[str, float] | None]


class FormatFigures(TypedDict):
    """A format, with the ends of its elements; `asked` is the name it was requested by."""

    name: str
    layout: str
    bits: float
    max: float
    min_normal: float
    min_subnormal: float
    max_exponent: int
    rounding: str
    asked: NotRequired[str]
    levels: NotRequired[list[float]]
    """The levels of a codebook, which may be trained on the tensor."""


class FormatChoice(TypedDict):
    """A format at its best scale, as one of several to choose from; bits are those of an element.

    `scale` is `2^-3`, or `blocks` where each block has its own, `blocks +1` with an offset.
    """

    format: str
    bits: float
    scale: str
    sqnr_db: float | str
    rest_db: float | str
    """SQNR without massive elements."""


class SweepRecord(TypedDict):
    """A sweep as plain data; in JSON "inf", "-inf" and "nan" are texts, and null is undefined."""

    kind: str
    format: FormatFigures
    tensor: dict[str, Any]
    parameters: SweepParameters
    levels: list[SweptLevel]
    advice: SweepAdvice
    failed: str | None
    versions: dict[str, str]
    choices: NotRequired[list[FormatChoice]]
    """Formats to choose from, in the first record of a tensor that was swept without naming one."""


def number(value: object) -> float:
    """Read a number of the record."""
    return float(value) if isinstance(value, int | float | str) else math.nan


def metric(level: SweptLevel, name: str) -> float:
    return number(level["metrics"].get(name))


def sqnr_without_massive(level: SweptLevel) -> float:
    """Read the SQNR without massive elements; NaN for levels where it was not measured."""
    return number(level.get("sqnr_db_without_massive"))


def flat_level(level: SweptLevel) -> SweptLevel:
    """Return a level as a row of a table, the metrics and severities as columns of their own."""
    row = {k: v for k, v in level.items() if k not in ("metrics", "severity", "marks")}
    row |= level["metrics"]
    row |= {f"{kind}_severity": grade for kind, grade in level["severity"].items()}
    return {**row, "marks": " ".join(level["marks"])}


def share(level: SweptLevel, kind: str) -> str:
    """Write the share of elements that overflow, underflow or are flushed."""
    return share_text(level[f"{kind}_share"])


def energy(level: SweptLevel, kind: str) -> str:
    """Write the share of the energy lost to saturation or to flushing."""
    return share_text(level["overflow_energy" if kind == "overflow" else "flush_energy"])


class SweepView:
    """A record with the derived values that texts, tables and pictures use."""

    def __init__(self, record: SweepRecord) -> None:
        self.record, self.is_block = record, record["kind"] == "block"
        self.tensor, self.format = record["tensor"], record["format"]
        self.parameters, self.advice = record["parameters"], record["advice"]
        self.levels: Sequence[SweptLevel] = record["levels"]
        self.best = self.levels[self.advice["recommended"]]
        self.word = "offset" if self.is_block else "exponent"
        usual = self.parameters["usual"]
        self.usual_kind, self.usual_exponent = usual["kind"], number(usual["exponent"])
        self.usual = self.marked(self.usual_kind)
        self.gap_db = number(self.advice["usual_gap_db"])
        """SQNR of the recommended level less that of the usual one."""

    def marked(self, mark: str) -> SweptLevel | None:
        """Return the level that carries a mark such as "production"."""
        return next((level for level in self.levels if mark in level["marks"]), None)

    def exponent(self, value: object) -> str:
        """Write an exponent, or the offset that it is in a sweep of blocks."""
        return offset_text(value) if self.is_block else exponent_text(value)

    def at(self, level: SweptLevel) -> str:
        return self.exponent(level["exponent"])

    def power(self, level: SweptLevel) -> str:
        """Write `2^-3`, or the offset `+1` in a sweep of blocks."""
        return self.at(level) if self.is_block else f"2^{self.at(level)}"

    @property
    def scale_text(self) -> str:
        """Write the recommended scale in a few characters: `2^-3`, `blocks` or `blocks +1`."""
        if not self.is_block:
            return scale_words(number(self.best["exponent"]))
        return f"blocks {self.at(self.best)}".removesuffix(" 0")

    def level_text(self, level: SweptLevel) -> str:
        """Write exponent or offset, factor, and whether a scale can hold it."""
        if self.is_block:
            return f"Offset = {self.at(level)}, Factor = {factor_text(level)}"
        unfit = "" if level["e8m0"] else ", not an E8M0 scale"
        return f"Scale Exp = {self.at(level)}, Factor = {factor_text(level)}{unfit}"

    @property
    def unfit(self) -> str:
        """Words for a recommended scale that is no power of two of E8M0; else empty."""
        if self.best["e8m0"]:
            return ""
        words = USUAL[self.usual_kind] if self.best is self.usual else ""
        return f"{words}, not an E8M0 scale".removeprefix(", ")

    @property
    def worth(self) -> str:
        """SQNR of the recommended level, also without massive elements where they hide errors."""
        ratio, reduced = metric(self.best, "sqnr_db"), sqnr_without_massive(self.best)
        if math.isnan(ratio):
            return "NaN"
        text = "exact" if ratio == math.inf else f"SQNR {ratio:.2f} dB"
        hidden = ratio - reduced > HIDDEN_DB
        return text + (f", {reduced:.2f} dB without massive elements" if hidden else "")

    @property
    def mse_cost(self) -> str:
        """Cost of the recommended level against the best MSE; empty if it is small."""
        cost = number(self.advice["mse_cost_db"])
        if not cost > COSTLY_DB:
            return ""
        finest = self.power(self.levels[self.advice["best_mse"]])
        much = f"{cost:.2f} dB more than" if math.isfinite(cost) else "an error, unlike"
        return f"{much} the best MSE, at {finest}"

    @property
    def prefix(self) -> str:
        """The start of names of files of MX formats and of their elements: fp8, fp6 and fp4."""
        return MX_PREFIX if self.requested_format.startswith(_MX_NAMES) else ""

    @property
    def requested_format(self) -> str:
        """The format as it was requested: `int8` where a block sweep is about `mxint8`."""
        return str(self.format.get("asked", self.format["name"]))

    def stem(self, kind: str) -> str:
        """Return the name of one of the sweep's files without an ending."""
        return f"{self.prefix}{kind}_{self.requested_format}"

    @property
    def format_title(self) -> str:
        """`fp8_e4m3 (e4m3)`: the name with the layout it really has."""
        layout = str(self.format["layout"])
        parts = re.fullmatch(r"1-([1-9]\d*)-(\d+)", layout)
        return f"{self.format['name']} ({f'e{parts[1]}m{parts[2]}' if parts else layout})"


def short(value: object) -> str:
    """Write a figure in a few characters, exact where those suffice."""
    figure = number(value)
    if not math.isfinite(figure):
        return "-" if math.isnan(figure) else str(figure)
    exact = repr(figure).removesuffix(".0")
    return "0" if figure == 0 else exact if len(exact) <= 9 else f"{figure:.4g}"


def exponent_text(value: object) -> str:
    """Write an exponent as `-120` or `0.25`."""
    exponent = number(value)
    if not math.isfinite(exponent):
        return str(exponent)
    text = f"{exponent:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def scale_words(exponent: float) -> str:
    """Write `2^-3`, or `0.02916` of a scale that is no power of two."""
    if exponent == round(exponent):
        return f"2^{exponent:g}"
    return f"{2.0**exponent:.4g}"


def offset_text(value: object) -> str:
    """Write `+1`, `0`, `-2`: the sign says which way the block exponents move."""
    text = exponent_text(value)
    return text if number(value) <= 0 else f"+{text}"


def factor_text(level: SweptLevel) -> str:
    """Write `2^-120 (7.5e-37)`: six decimals of a factor alone may show zeros."""
    power = f"2^{exponent_text(level['exponent'])}"
    factor = number(level["factor"])
    if not 0 < factor < math.inf:
        return power
    exact = repr(factor).removesuffix(".0")
    return f"{power} ({exact if len(exact) <= 6 else f'{factor:.2g}'})"


def share_text(value: object) -> str:
    """Write a share in percent; one that is not zero never reads as zero."""
    percent = number(value) * 100
    if percent != 0 and abs(percent) < 0.005:
        return f"{percent:.2g}%"
    return ">99.99%" if 99.995 <= percent < 100 else f"{percent:.2f}%"
