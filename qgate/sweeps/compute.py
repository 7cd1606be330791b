"""Sweep one quantizer over many power-of-two scales, and recommend one of them.

A tensor sweep gives the whole tensor one scale; a block sweep adds an integer offset to every
block's own shared exponent, which is what can be chosen in MX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from qgate.charts.overviews import Overview, Overviewed, frame_of
from qgate.charts.sheet import Sheet
from qgate.errors import QgateError, unknown
from qgate.formats import Format
from qgate.formats.mx import MxFormat
from qgate.records.plain_data import plain
from qgate.scales.levels import Alignment, Level, ends_of, levels_of, usual_of
from qgate.scales.search import Floats, best_exponent, merge_values
from qgate.stats import BlockCounts, Counts, Values, all_bf16, block_counts, counts
from qgate.stats.bits import CHUNK, DIRECT, as_tensors, countable, slabs
from qgate.sweeps._cells import CellEdges, ScaleGroup, in_cells
from qgate.sweeps._recording import Parts, record_of
from qgate.sweeps._sums import Folded
from qgate.sweeps.formats import element_of, mx_of, sweepable, with_shares
from qgate.sweeps.plots import draw_block, draw_metrics
from qgate.sweeps.record import SweepParameters, SweepRecord, SweptLevel, flat_level
from qgate.sweeps.shares import sweep_shares
from qgate.tensor_inputs import usual_arithmetic

if TYPE_CHECKING:
    import pandas as pd

_OFFSETS = (8, -4)
_SUBNORMAL = -127
Granularity = Literal["tensor", "block"]


@dataclass(frozen=True, repr=False)
class Sweep(Overviewed):
    """A sweep as plain data, with its most used parts as properties."""

    record: SweepRecord

    def overview(self) -> Overview:
        """Describe the sweep: the recommended level, its reasons, and the levels by SQNR."""
        level, record = self.recommended, self.record
        scale = "offset " if record["kind"] == "block" else "2^"
        title = (
            f"Sweep of {record['tensor']['name']} in {record['format']['name']}, "
            f"{len(record['levels'])} levels: {scale}{level['exponent']:g} recommended, "
            f"SQNR {level['metrics']['sqnr_db']:.2f} dB"
        )
        best = sorted(self.levels, key=lambda each: -_rank(each["metrics"]["sqnr_db"]))
        return Overview(title, best, _level_row, "level", self.reasons[:3])

    def _draw(self) -> Sheet | None:
        draw = draw_block if self.record["kind"] == "block" else draw_metrics
        return draw.build(self.record)

    @property
    def levels(self) -> list[SweptLevel]:
        """The levels, one per scale, the largest first."""
        return list(self.record["levels"])

    @property
    def recommended(self) -> SweptLevel:
        """The level to use."""
        return dict(self.levels[self.record["advice"]["recommended"]])

    @property
    def exponent(self) -> float:
        """The recommended scale exponent (tensor) or offset (block)."""
        return float(self.recommended["exponent"])

    @property
    def reasons(self) -> list[str]:
        return list(self.record["advice"]["reasons"])

    def to_dict(self) -> SweepRecord:
        """Return plain data for JSON: what is not finite is one of the texts inf, -inf and nan."""
        data: SweepRecord = plain(self.record)
        return data

    def to_frame(self) -> pd.DataFrame:
        """Return one row per level: exponent, metrics, overflow."""
        return frame_of(map(flat_level, self.levels))


def _rank(ratio: float) -> float:
    return -math.inf if math.isnan(ratio) else ratio


def _level_row(level: SweptLevel) -> dict[str, object]:
    row = flat_level(level)
    return {name: row[name] for name in ("exponent", "sqnr_db", "mse", "overflow", "flush")}


@usual_arithmetic()
def sweep(
    x: Tensor | Counts | BlockCounts | Values,
    format: str | Format,
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
    """Measure every metric of a format over scales 2**s, and recommend a scale.

    granularity "tensor": s runs from the smallest scale at which nothing overflows to the largest
    at which nothing underflows (`alignment="documented"`: the ends of megatron-tensor-saver), or as
    `max_exp` and `min_exp` say, in `levels` even steps plus all integers between, and on to the
    best power of two near amax. Integers are recommended, which E8M0 scales can be, unless
    amax / max is the format's usual scale (fp8, integers) and more than 1 dB better.

    granularity "block": s is an offset to each block's shared exponent, from `max_exp` (8) to
    `min_exp` (-4); an element format stands for its MX format. Of codebooks s multiplies the scale
    of every block by 2**s, in even steps and at 0, with either granularity.

    16-bit tensors are counted once, exactly; `x` may be such counts already. 32-bit ones are gone
    through chunk by chunk unless all their numbers are bf16 numbers.
    """
    if granularity not in ("tensor", "block"):
        raise unknown("granularity", granularity, ("tensor", "block"))
    if alignment not in ("exact", "documented"):
        raise unknown("alignment", alignment, ("exact", "documented"))
    if not 2 <= scale_bits <= 8:
        raise QgateError(f"scale_bits {scale_bits} is not allowed; it is from 2 to 8.")
    x = countable(x) if isinstance(x, Tensor) else x
    named = (name, list(x.shape) if isinstance(x, Tensor) else None)
    with np.errstate(under="ignore"):
        if (fmt := with_shares(format)) is not None:
            return Sweep(sweep_shares(x, fmt, levels, (max_exp, min_exp), axis, named))
        if granularity == "tensor":
            ends = (max_exp, min_exp, alignment)
            return _sweep_tensor(x, sweepable(format), levels, ends, scale_bits, named)
        return _sweep_blocks(x, mx_of(format), (max_exp, min_exp), scale_bits, block, axis, named)


# Sweeps of elements and of MX ---------------------------------------------------------------------


def _sweep_tensor(
    x: Any,
    format: Format,
    levels: int,
    bounds: tuple[float | None, float | None, Alignment],
    scale_bits: int,
    named: tuple[str, list[int] | None],
) -> Sweep:
    fmt, summary = element_of(format), _summarize(x)
    _require_numbers(summary, named[0])
    ends = ends_of(summary.amax, summary.amin, (fmt.max, fmt.min_normal), *bounds)
    is_mx, double = format.kind == "block", summary.dtype == "float64"
    usual = usual_of(fmt, summary.amax, mx=is_mx, double=double)
    best = best_exponent(fmt, *_magnitudes(summary), usual.exponent)
    parameters: SweepParameters = {
        "levels": levels,
        "max_exp": float(ends.maximum),
        "min_exp": float(ends.minimum),
        "alignment": ends.alignment,
        "scale_bits": scale_bits,
        "usual": {"kind": usual.kind, "exponent": usual.exponent},
        "production": int(usual.exponent) if usual.kind == "production" else None,
        "block": None,
        "axis": None,
        "scale_rule": None,
    }
    scales = levels_of(ends, levels, usual, best)
    return Sweep(
        record_of(fmt, summary, named, scales, partial(_magnitudes_of, summary), parameters)
    )


def _magnitudes(summary: Counts | Values) -> tuple[Floats, Floats]:
    """Return ascending magnitudes and their counts, as exactly as a search needs them."""
    if isinstance(summary, Counts):
        sizes, positive, negative = summary.folded()
        return sizes, positive + negative
    return merge_values(summary)


def _sweep_blocks(
    x: Any,
    mx: MxFormat,
    bounds: tuple[float | None, float | None],
    scale_bits: int,
    block: int,
    axis: int,
    named: tuple[str, list[int] | None],
) -> Sweep:
    high, low = (
        end if end is not None else default for end, default in zip(bounds, _OFFSETS, strict=True)
    )
    if high < low or not all(float(end).is_integer() for end in (high, low)):
        raise QgateError(
            f"offsets from {high:g} to {low:g} are not allowed; they are integers, "
            "the larger one first."
        )
    if isinstance(x, Counts):
        raise QgateError("value counts do not know blocks; use block_counts(x), or the tensor.")
    offsets = [
        Level(float(e), ("production",) if e == 0 else ())
        for e in sorted({*range(int(low), int(high) + 1), 0}, reverse=True)
    ]
    summary, parts = _block_magnitudes(x, mx, block, axis, scale_bits)
    _require_numbers(summary, named[0])
    parameters: SweepParameters = {
        "levels": len(offsets),
        "max_exp": float(high),
        "min_exp": float(low),
        "alignment": "given" if bounds != (None, None) else "exact",
        "scale_bits": scale_bits,
        "usual": {"kind": "production", "exponent": 0.0},
        "production": 0,
        "block": x.block if isinstance(x, BlockCounts) else block,
        "axis": axis,
        "scale_rule": "floor",
    }
    return Sweep(record_of(mx, summary, named, offsets, parts, parameters))


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
    if summary.amax < 2.0**-1000:  # scales and squared errors leave the range of float64
        limit = f"{float(summary.amax):.3g}, and sweeps need 1e-301: multiply it by a power of two."
        raise QgateError(f"{name} has no number beyond {limit}")


# Summaries and magnitudes ------------------------------------------------------------------------


def _summarize(x: Any) -> Counts | Values:
    """Count values where that is exact; else summarize the tensor itself."""
    if isinstance(x, Counts | Values):
        return x
    if isinstance(x, BlockCounts):
        raise QgateError("counts of blocks know no tensor scale; use counts(x), or the tensor.")
    if isinstance(x, Tensor) and x.dtype == torch.float32 and all_bf16(x):
        return counts(x, via="bf16")
    return counts(x)


def _magnitudes_of(summary: Counts | Values, edges: CellEdges | None) -> Iterator[Folded]:
    """Yield the magnitudes of all values, counted, in cells or a piece at a time."""
    if isinstance(summary, Counts):
        yield Folded(*summary.folded())
    else:
        yield from in_cells(summary.slabs(), _finite_values, edges)


def _finite_values(slab: Tensor) -> Iterator[ScaleGroup]:
    values = slab.reshape(-1).cpu().numpy()
    yield ScaleGroup(None, values[np.isfinite(values)])


def _block_magnitudes(
    x: Any, mx: MxFormat, block: int, axis: int, scale_bits: int
) -> tuple[Counts | Values, Parts]:
    """Return a summary of all values, and their magnitudes relative to their block's scale."""
    if block < 1:
        raise QgateError(f"block {block} is not allowed; it is at least 1.")
    summary = x if isinstance(x, Values) else None
    if summary is not None:
        if len(summary.tensors) > 1:
            raise QgateError("blocks are of one tensor; sweep each of several tensors by itself.")
        x = summary.tensors[0]
    if isinstance(x, Tensor) and not -max(x.dim(), 1) <= axis < max(x.dim(), 1):
        raise QgateError(f"axis {axis} is out of range for a tensor of {x.dim()} dimensions.")
    own_scale = partial(_own_scale, mx.element.max_exponent, scale_bits)
    if isinstance(x, np.ndarray):
        x = next(as_tensors(x))
    if isinstance(x, Tensor) and x.dtype in DIRECT and not all_bf16(x):
        along = x.detach().movedim(axis, -1) if x.dim() > 1 else x.detach()
        groups = partial(_block_groups, own_scale, block)
        return summary or counts(x), lambda edges: in_cells(
            slabs(along, CHUNK, unit=block), groups, edges
        )
    counted = x
    if not isinstance(x, BlockCounts):
        exactly = isinstance(x, Tensor) and x.dtype not in (torch.bfloat16, torch.float16)
        counted = block_counts(x, block=block, axis=axis, via="bf16" if exactly else None)
    return counted.total(), lambda _: _counted_blocks(counted, own_scale)


def _own_scale(emax: int, scale_bits: int, floor_log2_amax: int) -> int:
    """Return the shared exponent of a block before any offset, as the quantizer has it."""
    limit = 2 ** (scale_bits - 1) - 1
    exponent: int = max(floor_log2_amax - emax, -limit)
    # A scale of eight bits is clamped above; a narrower one is NaN there, which is left to see.
    return int(min(exponent, limit)) if scale_bits == 8 else exponent


def _counted_blocks(counted: BlockCounts, own_scale: Callable[[int], int]) -> Iterator[Folded]:
    for exponent, row in sorted(counted.rows.items()):
        own = own_scale(exponent)
        sizes, positive, negative = row.folded()
        yield Folded(np.ldexp(sizes, -own), positive, negative, own)


def _block_groups(
    own_scale: Callable[[int], int], block: int, slab: Tensor
) -> Iterator[ScaleGroup]:
    """Group the blocks of a slab by their own scale; those with NaN or Inf are left out."""
    length = slab.shape[-1]
    rows = slab.reshape(-1, length).cpu().numpy()
    whole = length // block * block
    for part in (rows[:, :whole].reshape(-1, block), rows[:, whole:]):
        if not part.size:
            continue
        good = part[np.isfinite(part).all(axis=1)]
        amax = np.abs(good).max(axis=1)
        exponents = np.where(amax > 0, np.frexp(amax)[1] - 1, _SUBNORMAL)
        for exponent in np.unique(exponents):
            yield ScaleGroup(own_scale(int(exponent)), good[exponents == exponent].reshape(-1))
