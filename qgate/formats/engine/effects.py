"""Counts of what a format does to a tensor, in total and per group of elements with one scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Unpack

import torch
from torch import Tensor

from qgate.charts.overviews import Overview, Overviewed
from qgate.formats._block import Format
from qgate.formats._work import ScaledChunk
from qgate.formats.engine.checking import check
from qgate.formats.engine.dtypes import INPUTS
from qgate.formats.engine.job import Job, split
from qgate.formats.engine.rotation import rotated
from qgate.formats.engine.scales import saturated
from qgate.formats.losses import Losses
from qgate.formats.options import Options
from qgate.formats.quantizer import Quantizer, as_quantizer
from qgate.tensor_inputs import plain_tensor
from qgate.text import counted

_TOTALS = ("elements", "finite", "saturated", "inf")
_LEFT_OUT = ("squared_error", "blocks")
_SHOWN = ("saturated", "flushed", "underflow", "subnormal", "poisoned")


@dataclass(frozen=True, repr=False)
class Effects(Overviewed, Losses):
    """Losses of a tensor in a format; `blocks` has counts per group, shaped as `Encoded.scales` is.

    subnormal              kept with less than full precision, below the smallest normal number
    saturated_error_share  the part of the squared error that saturated elements have
    squared_error          the sum of squared errors; reports are added with it
    """

    format: str = ""
    subnormal: int = 0
    saturated_error_share: float = 0.0
    squared_error: float = field(default=0.0, repr=False, compare=False)
    blocks: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __add__(self, other: Losses) -> Losses:
        """Add reports of one format, without their blocks; other sums are bare `Losses`."""
        counts = super().__add__(other)
        if not isinstance(other, Effects) or other.format != self.format:
            return counts
        noise = self.squared_error + other.squared_error
        of_saturated = sum(
            each.saturated_error_share * each.squared_error for each in (self, other)
        )
        return Effects(
            **vars(counts),
            format=self.format,
            subnormal=self.subnormal + other.subnormal,
            saturated_error_share=_share(of_saturated, noise),
            squared_error=noise,
        )

    def to_dict(self) -> dict[str, object]:
        """Return the totals as plain data."""
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _LEFT_OUT}
        return counts | {name: getattr(self, name) for name in _TOTALS}

    def overview(self) -> Overview:
        """Describe the losses: what share of the elements had each outcome."""
        title = (
            f"{self.format} of {counted(self.elements, 'element')}: "
            f"{self.share('saturated'):.4%} saturated, {self.share('flushed'):.4%} flushed to zero"
        )
        beyond = [] if self.nan + self.inf == 0 else [f"{self.nan:,} NaN and {self.inf:,} Inf"]
        return Overview(title, _SHOWN, self._outcome_row, "outcome", beyond, "% of finite")

    def _outcome_row(self, kind: str) -> dict[str, object]:
        share = 100 * self.share(kind)
        return {"outcome": kind, "elements": getattr(self, kind), "% of finite": share}

    def __str__(self) -> str:
        lines = [f"{self.format}: {self.elements} elements, {self.finite} finite"]
        for kind in ("nan", "inf"):
            lines.append(f"  {kind:12} {getattr(self, kind):>12}")
        for kind in _SHOWN:
            lines.append(
                f"  {kind:12} {getattr(self, kind):>12} {self.share(kind):9.4%} of the finite"
            )
        if self.beyond_range is not None:
            lines.append(
                f"  beyond range {self.beyond_range:>12} {self.beyond_range_share:9.4%} of all"
            )
        return "\n".join(lines)


def report(x: Tensor, fmt: str | Format | Quantizer, **options: Unpack[Options]) -> Effects:
    """Count what `quantize(x, fmt, ...)` saturates, flushes to zero and stores as subnormal."""
    q = as_quantizer(fmt, options)
    check(x, q)
    x = plain_tensor(x, "count what a format does to", INPUTS)
    if q.rotation is not None:
        x = rotated(x.detach(), q)
    job = Job(x, q, counting=True)
    smallest = q.format.element.min_normal
    rows = {kind: job.rows(1, torch.int64) for kind in (*counted_of(q), "subnormal")}
    squares = torch.zeros(3, dtype=torch.float64, device=x.device)
    filled = job.layout.is_filled
    inside = job.layout.arrange(torch.ones_like(x, dtype=torch.bool)) if filled else None
    for chunk, _, wide, parts in split(job):
        hits = outcomes(wide, parts, q)
        squares += error_squares(wide, parts, hits)
        size = parts.elements.abs()
        hits["subnormal"] = hits["nonzero"] & (size > 0) & (size < smallest)
        for kind, hit in hits.items():
            mask = hit if inside is None else hit & chunk.data(inside)
            chunk.group(rows[kind]).add_(mask.sum(2, keepdim=True))
    totals = {kind: int(counts.sum()) for kind, counts in rows.items()}
    _, noise, of_saturated = squares.tolist()
    rows["saturated"] = rows["upper"] + rows["lower"]
    return Effects(
        beyond_range=totals.pop("beyond_range", None),
        **totals,
        format=q.format.name,
        saturated_error_share=_share(of_saturated, noise),
        squared_error=noise,
        blocks={kind: job.shaped(counts) for kind, counts in rows.items()},
    )


def _share(part: float, whole: float) -> float:
    return part / whole if 0 < whole < math.inf else 0.0


def counted_of(q: Quantizer) -> list[str]:
    """List the counts of a quantizer; with scales it has no `beyond_range`."""
    is_cast = q.granularity is None
    return [f.name for f in fields(Losses) if is_cast or f.name != "beyond_range"]


def outcomes(wide: Tensor, parts: ScaledChunk, q: Quantizer) -> dict[str, Tensor]:
    """Find the elements of a chunk that each count of `Losses` counts; a kind without may miss."""
    element, size = q.format.element, wide.abs()
    zero = size == 0
    good = nonzero = ~zero
    hits = {"zeros": zero, "nonzero": nonzero}
    finite = wide.isfinite()
    if not bool(finite.all()):
        good = nonzero = nonzero & finite
        hits |= {"nan": wide.isnan(), "posinf": wide == math.inf, "neginf": wide == -math.inf}
        hits["nonzero"] = nonzero
    spoilt = parts.scale.isnan()
    if bool(spoilt.any()):
        hits["poisoned"] = finite & spoilt
        good = nonzero & ~spoilt
    beyond = saturated(parts, q) & good
    hits["upper"] = beyond & (wide > 0)
    hits["lower"] = beyond & (wide < 0)
    hits["flushed"] = good & (parts.elements * parts.scale == 0)
    hits["underflow"] = good & (size < element.min_normal * parts.scale)
    if "beyond_range" in counted_of(q):
        low, high = element.bounds()
        hits["beyond_range"] = (wide > high) | (wide < low)
    return hits


def losses_of(hits: Mapping[str, Tensor]) -> Losses:
    """Count the outcomes of a chunk."""
    counts = {kind: int(mask.count_nonzero()) for kind, mask in hits.items()}
    return Losses(beyond_range=counts.pop("beyond_range", None), **counts)


def error_squares(
    wide: Tensor, parts: ScaledChunk, hits: Mapping[str, Tensor], most: float = math.inf
) -> Tensor:
    """Sum the squares of values, of their errors, and of the errors of saturated ones.

    Only magnitudes up to `most` count.
    """
    error = parts.elements * parts.scale - wide
    if "nan" in hits or "poisoned" in hits or most < math.inf:
        counted = hits["nonzero"]
        counted = counted & ~hits["poisoned"] if "poisoned" in hits else counted
        counted = counted & (wide.abs() <= most) if most < math.inf else counted
        wide, error = wide.where(counted, 0.0), error.where(counted, 0.0)
    clipped = error[hits["upper"] | hits["lower"]]
    return torch.stack([part.reshape(-1) @ part.reshape(-1) for part in (wide, error, clipped)])
