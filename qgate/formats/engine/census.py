"""What a format does to a tensor, counted: per tensor and per group of elements with one scale."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from qgate.formats.engine.job import Job, element_of, saturated, split
from qgate.formats.quantizer import as_quantizer

if TYPE_CHECKING:
    from qgate.formats._literals import Format
    from qgate.formats.quantizer import Options, Quantizer

_KINDS = ("saturated", "underflow", "flushed", "subnormal", "nan", "inf", "poisoned")


@dataclass(frozen=True)
class Effects:
    """Counts of elements; `blocks` has the same counts per group, shaped as `Encoded.scales` is.

    saturated  finite and beyond the largest value at its scale
    underflow  not zero and below the smallest normal number at its scale, before rounding
    flushed    not zero before, zero after
    subnormal  kept with less than full precision, below the format's smallest normal number
    nan, inf   in the input
    poisoned   finite, but NaN after, because the scale of its group is NaN
    """

    format: str
    elements: int
    saturated: int
    underflow: int
    flushed: int
    subnormal: int
    nan: int
    inf: int
    poisoned: int
    blocks: dict[str, Tensor] = field(repr=False, compare=False)

    def share(self, kind: str) -> float:
        """The part of all elements, 0 to 1."""
        return float(getattr(self, kind)) / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The totals as plain data."""
        return {key: value for key, value in asdict(self).items() if key != "blocks"}

    def __str__(self) -> str:
        lines = [f"{self.format}: {self.elements} elements"]
        lines += [
            f"  {kind:9} {getattr(self, kind):>12} {self.share(kind):9.4%}" for kind in _KINDS
        ]
        return "\n".join(lines)


def report(x: Tensor, fmt: str | Format | Quantizer, **options: Unpack[Options]) -> Effects:
    """Count what `quantize(x, fmt, ...)` saturates, flushes to zero and stores as subnormal."""
    q = as_quantizer(fmt, options)
    job = Job(x, q, looking=True)
    smallest = element_of(q.format).min_normal
    rows = {kind: job.rows(1, torch.int64) for kind in _KINDS}
    for chunk, _, wide, parts in split(job):
        finite = wide.isfinite()
        bad = parts.scale.isnan().expand_as(wide)
        good = finite & ~bad
        size = parts.elements.abs()
        found = {
            "saturated": saturated(wide, parts, q) & good,
            "underflow": (wide != 0) & (wide.abs() < smallest * parts.scale) & good,
            "flushed": (wide != 0) & (size == 0) & good,
            "subnormal": (size > 0) & (size < smallest) & good,
            "nan": wide.isnan(),
            "inf": wide.isinf(),
            "poisoned": finite & bad,
        }
        for kind, hits in found.items():
            chunk.group(rows[kind]).add_(hits.sum(2, keepdim=True))
    totals = {kind: int(rows[kind].sum()) for kind in _KINDS}
    blocks = {kind: job.shaped(rows[kind]) for kind in _KINDS}
    return Effects(q.format.name, x.numel(), **totals, blocks=blocks)
