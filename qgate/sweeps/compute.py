"""The scale sweep: one quantizer over many power-of-two scales, and one piece of advice.

A tensor sweep puts one scale on the whole tensor; a block sweep moves an integer offset around
every block's own shared exponent, which is the knob that MX has.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from qgate.errors import QgateError, unknown
from qgate.formats import FORMATS, ElementFormat, Format, is_format
from qgate.formats.mx import MxFormat, mx_format
from qgate.scales.levels import Alignment, Level, ends_of, levels_of, usual_of
from qgate.scales.search import Floats, best_exponent, merged_chunks
from qgate.stats import BlockCounts, Counts, Values
from qgate.sweeps import advice as advising
from qgate.sweeps._massive import tell_massive
from qgate.sweeps._recording import plain, record_of, tensor_parameters
from qgate.sweeps._sources import blocks_of, summarized, values_of
from qgate.sweeps._sums import LevelSums

if TYPE_CHECKING:
    import pandas as pd

_OFFSETS = (8, -4)
Granularity = Literal["tensor", "block"]


@dataclass(frozen=True)
class Sweep:
    """A sweep as plain data, with the parts most asked for by name."""

    record: dict[str, Any]

    def __repr__(self) -> str:
        level, record = self.recommended, self.record
        return (
            f"Sweep({record['tensor']['name']}, {record['format']['name']}, "
            f"{len(record['levels'])} levels: {level['exponent']:g} recommended, "
            f"SQNR {level['metrics']['sqnr_db']:.2f} dB)"
        )

    @property
    def levels(self) -> list[dict[str, Any]]:
        """One per scale, the largest first."""
        return list(self.record["levels"])

    @property
    def recommended(self) -> dict[str, Any]:
        """The level to use."""
        return dict(self.levels[self.record["advice"]["recommended"]])

    @property
    def exponent(self) -> float:
        """The recommended scale exponent (tensor) or offset (block)."""
        return float(self.recommended["exponent"])

    @property
    def reasons(self) -> list[str]:
        return list(self.record["advice"]["reasons"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: numbers that are not finite are the strings inf, -inf and nan."""
        data: dict[str, Any] = plain(self.record)
        return data

    def to_frame(self) -> pd.DataFrame:
        """One row per level: exponent, metrics, overflow."""
        import pandas as pd

        rows = []
        for level in self.levels:
            row = {k: v for k, v in level.items() if k not in ("metrics", "severity", "marks")}
            row |= level["metrics"]
            row |= {f"{kind}_severity": grade for kind, grade in level["severity"].items()}
            rows.append({**row, "marks": " ".join(level["marks"])})
        return pd.DataFrame(rows)


def sweep(
    x: Tensor | Counts | BlockCounts | Values,
    format: str | ElementFormat | MxFormat,
    levels: int = 21,
    max_exp: float | None = None,
    min_exp: float | None = None,
    granularity: Granularity = "tensor",
    *,
    alignment: Alignment = "exact",
    scale_bits: int = 8,
    block: int = 32,
    axis: int = -1,
    name: str = "tensor",
) -> Sweep:
    """Every metric of a format over scales 2**s, and the scale to use.

    granularity "tensor": s runs from the smallest scale at which nothing overflows to the largest
    at which nothing underflows (`alignment="documented"`: the ends of the known tool), or as
    `max_exp` and `min_exp` say, in `levels` even steps plus all integers between, and on to the
    best power of two near amax. Only integers can be E8M0 scales, and only they are recommended.

    granularity "block": s is an offset to each block's shared exponent, from `max_exp` (8) to
    `min_exp` (-4); an element format stands for its MX format.

    16-bit tensors are counted once, exactly; `x` may be such counts already. 32-bit ones are gone
    through chunk by chunk unless all their numbers are bf16 numbers.
    """
    if granularity not in ("tensor", "block"):
        raise unknown("granularity", granularity, ("tensor", "block"))
    if alignment not in ("exact", "documented"):
        raise unknown("alignment", alignment, ("exact", "documented"))
    if not 2 <= scale_bits <= 8:
        raise QgateError(f"scale_bits {scale_bits} is not allowed; it is from 2 to 8.")
    shape = list(x.shape) if isinstance(x, Tensor) else None
    if granularity == "block":
        return _sweep_blocks(
            x, mx_of(format), max_exp, min_exp, scale_bits, block, axis, name, shape
        )
    fmt, mx = element_of(format), sweepable(format).kind == "block"
    return _sweep_tensor(x, fmt, mx, levels, max_exp, min_exp, alignment, scale_bits, name, shape)


def sweepable(format: Any, *, block: bool = False) -> Format:
    """Return a format by name or itself; the error of a wrong name lists what can be swept."""
    if isinstance(format, str):
        try:
            return FORMATS.get(format)
        except QgateError:
            names = [each.name for each in FORMATS if (has_mx(each) if block else _is_swept(each))]
            also = itertools.chain.from_iterable(map(FORMATS.aliases, names))
            raise unknown("format", format, names, also) from None
    if not is_format(format):
        raise TypeError(f"a format is a name or a qgate format, not {type(format).__name__}.")
    return format


def _is_swept(fmt: Format) -> bool:
    return fmt.kind == "element" or mx_format(fmt) is not None


def element_of(format: str | ElementFormat | MxFormat) -> ElementFormat:
    """The element format that a tensor sweep scales."""
    fmt = sweepable(format)
    if _is_swept(fmt):
        return fmt.element
    raise QgateError(
        f"{fmt.name} has scales of its own and cannot be swept; sweep {_element_name(fmt)}."
    )


def _element_name(fmt: Format) -> str:
    known = next((f.name for f in FORMATS if f == fmt.element), None)
    return f"its elements, {known}" if known else "its elements"


def mx_of(format: str | ElementFormat | MxFormat) -> MxFormat:
    """Return the MX format that a format means in a block sweep."""
    fmt = sweepable(format, block=True)
    found = _mx_twin(fmt)
    if found is None:
        names = ", ".join(each.name for each in FORMATS if mx_format(each))
        raise QgateError(
            f"{fmt.name} has no MX format, so no block sweep; those that have: {names}."
        )
    return found


def has_mx(format: str | Format) -> bool:
    """Tell if a format stands for an MX format in a block sweep."""
    return _mx_twin(sweepable(format)) is not None


def _mx_twin(fmt: Format) -> MxFormat | None:
    if fmt.kind == "block":
        return mx_format(fmt)
    candidates = filter(None, map(mx_format, FORMATS))
    return next(
        (m for m in candidates if m.element == fmt or (fmt.name, m.name) == ("int8", "mxint8")),
        None,
    )


def _sweep_tensor(
    x: Any,
    fmt: ElementFormat,
    mx: bool,
    levels: int,
    max_exp: float | None,
    min_exp: float | None,
    alignment: Alignment,
    scale_bits: int,
    name: str,
    shape: list[int] | None,
) -> Sweep:
    summary = summarized(x)
    _require_numbers(summary, name)
    limits = (fmt.max, fmt.min_normal)
    ends = ends_of(summary.amax, summary.amin, limits, max_exp, min_exp, alignment)
    usual = usual_of(fmt, summary.amax, mx=mx, double=summary.dtype == "float64")
    best = best_exponent(fmt, *_magnitudes(summary), usual.exponent)
    places = levels_of(ends, levels, usual, best)
    exponents, scales = [at.exponent for at in places], [at.factor for at in places]
    sums = LevelSums(fmt, exponents, summary.mean, summary.amax, scales=scales)
    for folded in values_of(summary):
        sums.add(folded)
    record = record_of("tensor", fmt, summary, name, shape, places, sums, scale_bits)
    record["parameters"] = tensor_parameters(ends, levels, scale_bits, usual)
    made = _finished(record, sums, block=False)
    tell_massive(made.record, fmt, summary, lambda: values_of(summary))
    return made


def _magnitudes(summary: Counts | Values) -> tuple[Floats, Floats]:
    """Ascending magnitudes and how often each occurs, as far as a search needs to know them."""
    if isinstance(summary, Counts):
        sizes, positive, negative = summary.folded()
        return sizes, positive + negative
    return merged_chunks(summary.chunks(), summary.amax)


def _sweep_blocks(
    x: Any,
    mx: MxFormat,
    max_exp: float | None,
    min_exp: float | None,
    scale_bits: int,
    block: int,
    axis: int,
    name: str,
    shape: list[int] | None,
) -> Sweep:
    high, low = (
        given if given is not None else default
        for given, default in zip((max_exp, min_exp), _OFFSETS, strict=True)
    )
    if high < low or not all(float(end).is_integer() for end in (high, low)):
        raise QgateError(
            f"offsets from {high:g} to {low:g} are not allowed; they are integers, "
            "the larger one first."
        )
    if isinstance(x, Counts):
        raise QgateError("value counts do not know blocks; use block_counts(x), or the tensor.")
    places = [
        Level(float(e), ("production",) if e == 0 else ())
        for e in sorted({*range(int(low), int(high) + 1), 0}, reverse=True)
    ]
    summary, parts = blocks_of(x, mx, block, axis, scale_bits)
    _require_numbers(summary, name)
    exponents = [level.exponent for level in places]
    sums = LevelSums(mx.element, exponents, summary.mean, summary.amax, scale_bits)
    for folded in parts:
        sums.add(folded)
    if sums.n == 0:
        raise QgateError(f"{name}: every block holds NaN or Inf, so there is nothing to sweep.")
    record = record_of("block", mx, summary, name, shape, places, sums, scale_bits)
    record["parameters"] = {
        "levels": len(places),
        "max_exp": float(high),
        "min_exp": float(low),
        "alignment": "given" if (max_exp, min_exp) != (None, None) else "exact",
        "scale_bits": scale_bits,
        "usual": {"kind": "production", "exponent": 0.0},
        "production": 0,
        "block": x.block if isinstance(x, BlockCounts) else block,
        "axis": axis,
        "scale_rule": "floor",
    }
    made = _finished(record, sums, block=True)
    tell_massive(
        made.record, mx.element, summary, lambda: blocks_of(x, mx, block, axis, scale_bits)[1]
    )
    return made


def _require_numbers(summary: Counts | Values, name: str) -> None:
    if summary.n == 0:
        raise QgateError(f"{name} is empty: there is nothing to sweep.")
    if summary.finite == 0:
        raise QgateError(
            f"{name} holds no finite number: {summary.nan} NaN, "
            f"{summary.posinf + summary.neginf} Inf."
        )
    if summary.amax == 0:
        raise QgateError(f"{name} is all zeros: every scale is exact and none is better.")


def _finished(record: dict[str, Any], sums: LevelSums, *, block: bool) -> Sweep:
    tensor = record["tensor"]
    for level in record["levels"]:
        factor = 1.0 if block else level["factor"]
        level["scaled_min"], level["scaled_max"] = tensor["min"] / factor, tensor["max"] / factor
    record["advice"] = advising.advise(
        record["levels"],
        block=block,
        scale_bits=record["parameters"]["scale_bits"],
        usual=record["parameters"]["usual"],
    )
    if block:
        record["tensor"]["poisoned"] = tensor["elements"] - int(sums.n)
    return Sweep(record)
