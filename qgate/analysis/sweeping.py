"""The scale sweep: one quantizer over many power-of-two scales, and one piece of advice.

A tensor sweep puts one scale on the whole tensor; a block sweep moves an integer offset around
every block's own shared exponent, which is the knob that MX has.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from qgate._version import __version__
from qgate.analysis import advice as advising
from qgate.analysis._levels import Alignment, Ends, Level, ends_of, levels_of
from qgate.analysis._sums import Folded, LevelSums
from qgate.errors import QgateError, unknown
from qgate.formats import FORMATS, ElementFormat
from qgate.formats.mx import MxFormat
from qgate.stats import BlockCounts, Counts, Values, block_counts, counts

if TYPE_CHECKING:
    import pandas as pd

_SMALLEST_MX = -127
_OFFSETS = (8, -4)
Granularity = Literal["tensor", "block"]


@dataclass(frozen=True)
class Sweep:
    """A sweep as plain data, with the parts most asked for by name."""

    record: dict[str, Any]

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
        plain: dict[str, Any] = _plain(self.record)
        return plain

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
    `max_exp` and `min_exp` say, in `levels` even steps plus all integers between. Only integers
    can be E8M0 scales, and only they are recommended.

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
    return _sweep_tensor(
        x, element_of(format), levels, max_exp, min_exp, alignment, scale_bits, name, shape
    )


def element_of(format: str | ElementFormat | MxFormat) -> ElementFormat:
    """The element format that a tensor sweep scales."""
    fmt = FORMATS.get(format) if isinstance(format, str) else format
    if isinstance(fmt, ElementFormat):
        return fmt
    if isinstance(fmt, MxFormat):
        return fmt.element
    raise QgateError(f"{fmt.name} has scales of its own and cannot be swept; sweep its elements.")


def mx_of(format: str | ElementFormat | MxFormat) -> MxFormat:
    """The MX format that a format means in a block sweep."""
    fmt = FORMATS.get(format) if isinstance(format, str) else format
    if isinstance(fmt, MxFormat):
        return fmt
    known = [f for f in FORMATS if isinstance(f, MxFormat)]
    for candidate in known:
        if candidate.element == fmt or (fmt.name, candidate.name) == ("int8", "mxint8"):
            return candidate
    names = ", ".join(f.name for f in known)
    raise QgateError(f"{fmt.name} has no MX format, so no block sweep; those that have: {names}.")


def summarized(x: Any) -> Counts | Values:
    """Counts where they are exact, else the tensor itself behind the same questions."""
    if isinstance(x, Counts | Values):
        return x
    if isinstance(x, BlockCounts):
        raise QgateError("counts of blocks know no tensor scale; use counts(x), or the tensor.")
    if not isinstance(x, Tensor):
        return counts(x)
    if x.dtype == torch.float32 and all_bf16(x):
        return counts(x, via="bf16")
    return counts(x)


def all_bf16(x: Tensor) -> bool:
    """If every float32 number is a bf16 number, as in files saved from bf16 tensors."""
    flat = x.detach().reshape(-1).view(torch.int32)
    step = 2**20
    return all(not bool((flat[i : i + step] & 0xFFFF).any()) for i in range(0, len(flat), step))


def _sweep_tensor(
    x: Any,
    fmt: ElementFormat,
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
    ends = ends_of(
        summary.amax,
        summary.amin,
        (fmt.max, fmt.min_normal, fmt.max_exponent),
        max_exp,
        min_exp,
        alignment,
    )
    places = levels_of(ends, levels)
    sums = LevelSums(fmt, [level.exponent for level in places], summary.mean, summary.amax)
    if isinstance(summary, Counts):
        sums.add(Folded(*summary.folded()))
    else:
        for chunk in summary.chunks():
            sums.add(Folded.each(chunk))
    record = _record("tensor", fmt, summary, name, shape, places, sums, scale_bits)
    record["parameters"] = _tensor_parameters(ends, levels, scale_bits)
    return _finished(record, sums, block=False)


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
    limit = 2 ** (scale_bits - 1) - 1
    summary, parts = _blocks(x, mx, block, axis, limit)
    _require_numbers(summary, name)
    exponents = [level.exponent for level in places]
    sums = LevelSums(mx.element, exponents, summary.mean, summary.amax)
    for folded in parts:
        sums.add(folded)
    if sums.n == 0:
        raise QgateError(f"{name}: every block holds NaN or Inf, so there is nothing to sweep.")
    record = _record("block", mx, summary, name, shape, places, sums, 8)
    record["parameters"] = {
        "levels": len(places),
        "max_exp": float(high),
        "min_exp": float(low),
        "alignment": "given" if (max_exp, min_exp) != (None, None) else "exact",
        "scale_bits": scale_bits,
        "production": 0,
        "block": x.block if isinstance(x, BlockCounts) else block,
        "axis": axis,
        "scale_rule": "floor",
    }
    return _finished(record, sums, block=True)


def _blocks(
    x: Any, mx: MxFormat, block: int, axis: int, limit: int
) -> tuple[Counts | Values, Iterator[Folded]]:
    """A summary of all values, and magnitudes relative to their block's scale with that scale."""
    emax = mx.element.max_exponent
    if isinstance(x, Tensor) and x.dtype == torch.float32 and all_bf16(x):
        x = x.to(torch.bfloat16)
    if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64):
        return counts(x), _direct_blocks(x, emax, block, axis, limit)
    counted = x if isinstance(x, BlockCounts) else block_counts(x, block=block, axis=axis)
    return _unblocked(counted), _counted_blocks(counted, emax, limit)


def _unblocked(counted: BlockCounts) -> Counts:
    """The counts of all values, whatever their block."""
    total = counted.poisoned.copy()
    for row in counted.rows.values():
        total = total + row
    return Counts(counted.dtype, total)


def _counted_blocks(
    counted: BlockCounts, emax: int, limit: int
) -> Iterator[Folded]:
    for exponent, (values, weights) in counted.weighted().items():
        scale = 2.0 ** min(max(exponent - emax, -limit), limit)
        yield Folded.of(values / scale, weights, scale)


def _direct_blocks(
    x: Tensor, emax: int, block: int, axis: int, limit: int
) -> Iterator[Folded]:
    from qgate.stats._bits import CHUNK, slabs

    along = x.detach().movedim(axis, -1) if x.dim() > 1 else x.detach()
    for slab in slabs(along, CHUNK, unit=block):
        length = slab.shape[-1]
        rows = slab.reshape(-1, length).to("cpu", torch.float64).numpy()
        whole = length // block * block
        for part in (rows[:, :whole].reshape(-1, block), rows[:, whole:]):
            if not part.size:
                continue
            good = part[np.isfinite(part).all(axis=1)]
            amax = np.abs(good).max(axis=1, keepdims=True)
            exponent = np.where(amax > 0, np.frexp(amax)[1] - 1 - emax, _SMALLEST_MX)
            scale = np.exp2(np.clip(exponent, -limit, limit).astype(np.float64))
            every = np.broadcast_to(scale, good.shape).reshape(-1)
            yield Folded.each((good / scale).reshape(-1), every)


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


def _record(
    kind: str,
    fmt: ElementFormat | MxFormat,
    summary: Counts | Values,
    name: str,
    shape: list[int] | None,
    places: list[Level],
    sums: LevelSums,
    scale_bits: int,
) -> dict[str, Any]:
    element = fmt if isinstance(fmt, ElementFormat) else fmt.element
    odd = {"NaN": summary.nan, "Inf": summary.posinf + summary.neginf}
    bad = " and ".join(f"{count} {what}" for what, count in odd.items() if count)
    rounded = summary.rounded_from
    return {
        "kind": kind,
        "format": {
            "name": fmt.name,
            "layout": fmt.layout,
            "bits": fmt.bits,
            "max": element.max,
            "min_normal": element.min_normal,
            "min_subnormal": element.min_subnormal,
            "max_exponent": element.max_exponent,
            "rounding": element.rounding,
        },
        "tensor": {
            "name": name,
            "path": None,
            "shape": shape,
            "dtype": rounded or summary.dtype,
            "sha256": None,
            "elements": summary.n,
            "nan": summary.nan,
            "posinf": summary.posinf,
            "neginf": summary.neginf,
            "zeros": summary.zeros,
            "min": summary.min,
            "max": summary.max,
            "amax": summary.amax,
            "amin": summary.amin,
            "mean": summary.mean,
            "std": summary.std,
            "rounded_to": None,
        },
        "levels": [_level(sums, i, place, scale_bits) for i, place in enumerate(places)],
        "failed": f"{bad} in the tensor" if bad else None,
        "versions": {
            "qgate": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def _level(sums: LevelSums, i: int, place: Level, scale_bits: int) -> dict[str, Any]:
    n, exponent = sums.n, place.exponent
    energy = sums.r_square or 1.0
    shares = {
        "overflow": float(sums.over[i] / n),
        "underflow": float(sums.under[i] / n),
        "flush": float(sums.flush[i] / n),
    }
    limit = 2 ** (scale_bits - 1) - 1
    return {
        "exponent": exponent,
        "integer": place.integer,
        "factor": float(np.exp2(exponent)),
        "e8m0": place.integer and abs(exponent) <= limit,
        "marks": list(place.marks),
        "metrics": sums.metrics(i),
        "overflow": int(sums.over[i]),
        "overflow_share": shares["overflow"],
        "overflow_energy": float(sums.over_energy[i] / energy),
        "underflow": int(sums.under[i]),
        "underflow_share": shares["underflow"],
        "flush": int(sums.flush[i]),
        "flush_share": shares["flush"],
        "flush_energy": float(sums.flush_energy[i] / energy),
        "severity": {kind: advising.severity(share) for kind, share in shares.items()},
        "significant": max(shares["overflow"], shares["underflow"]) > advising.SIGNIFICANT,
    }


def _tensor_parameters(ends: Ends, levels: int, scale_bits: int) -> dict[str, Any]:
    return {
        "levels": levels,
        "max_exp": float(ends.maximum),
        "min_exp": float(ends.minimum),
        "alignment": ends.alignment,
        "scale_bits": scale_bits,
        "production": ends.production,
        "block": None,
        "axis": None,
        "scale_rule": None,
    }


def _finished(record: dict[str, Any], sums: LevelSums, *, block: bool) -> Sweep:
    tensor = record["tensor"]
    for level in record["levels"]:
        factor = 1.0 if block else level["factor"]
        level["scaled_min"], level["scaled_max"] = tensor["min"] / factor, tensor["max"] / factor
    record["advice"] = advising.advise(
        record["levels"], block=block, scale_bits=record["parameters"]["scale_bits"]
    )
    if block:
        record["tensor"]["poisoned"] = tensor["elements"] - int(sums.n)
    return Sweep(record)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
