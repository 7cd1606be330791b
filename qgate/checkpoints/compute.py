"""Figures of one quantized weight: its error beside that of an ideal quantizer, and its scales.

The ideal quantizer has the same elements and tiles, and scales made from the parent. Codes that are
nearest to the parent at the stored scales tell faults of codes from faults of scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight, decode_e8m0, widen
from qgate.checkpoints.record import ScaleFigures, WeightFigures
from qgate.formats import get

PER_DB = 10.0
SAMPLE = 1 << 16
"""Elements among which unused codes are looked for first."""


def element_range(element: str) -> tuple[float, float]:
    """Return the smallest and the largest value of an element format."""
    if element.startswith("uint"):
        return 0.0, float(2 ** int(element[4:]) - 1)
    if element.startswith("int"):
        half = 2 ** (int(element[3:]) - 1)
        return float(-half), float(half - 1)
    return -get(element).max, get(element).max


def round_to(element: str, x: Tensor) -> Tensor:
    """Round to the nearest value of an element format, and saturate."""
    low, high = element_range(element)
    if element.startswith(("int", "uint")):
        return x.round().clamp_(low, high)
    if element == "fp4_e2m1":
        x = x.clamp(low, high)
        # Steps of 0.5 below 2, of 1 below 4, of 2 above: each rounded to even in its own grid.
        fine, middle = (x * 2).round_().mul_(0.5), x.round()
        coarse = (x * 0.5).round_().mul_(2)
        magnitude = x.abs()
        return torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse))
    return widen(x.clamp(low, high).to(_FP8[element]))


_FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}


def ideal_values(weight: QuantizedWeight, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return what an ideal quantizer of the same elements and tiles makes of the parent.

    Its scales are returned, too, one per tile.
    """
    blocks = weight.in_tiles(parent)
    low, high = element_range(weight.element)
    if weight.element == "int32":
        # Sums of products: their scale is that of the inputs times the weight's.
        scales = weight.scales[:, None, :, None]
        values = round_to(weight.element, blocks / scales) * scales
    elif weight.zero_points is not None:
        smallest = blocks.amin((1, 3), keepdim=True).clamp(max=0)
        largest = blocks.amax((1, 3), keepdim=True).clamp(min=0)
        scales = ((largest - smallest) / (high - low)).clamp(min=torch.finfo(torch.float32).tiny)
        zeros = (low - smallest / scales).round().clamp(low, high)
        values = (round_to(weight.element, blocks / scales + zeros) - zeros) * scales
    else:
        least, most = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
        scales = _symmetric_scales(weight, torch.maximum(-least, most), high)
        values = round_to(weight.element, blocks / scales).mul_(scales)
    return weight.from_tiles(values), scales[:, 0, :, 0]


def _symmetric_scales(weight: QuantizedWeight, amax: Tensor, largest: float) -> Tensor:
    codes = weight.scale_codes
    if codes is None:
        scales = amax / largest
    elif codes.dtype == torch.uint8:
        # The scale rule of MX: the exponent of the largest magnitude less that of the element's.
        _, exponents = torch.frexp(amax)
        _, top = torch.frexp(torch.tensor(largest))
        scales = decode_e8m0((exponents - top + 127).clamp(0, 254).to(torch.uint8))
    else:
        # NVFP4: block scales in E4M3, times the scale of the whole tensor that is stored.
        stored = codes.float()
        whole = (weight.scales / torch.where(stored == 0, torch.nan, stored)).nanmedian()
        whole = torch.where(whole.isfinite() & (whole > 0), whole, 1.0)
        scales = round_to("fp8_e4m3", amax / largest / whole) * whole
    return torch.where(scales > 0, scales, 1.0)


@dataclass
class _Sums:
    """Sums over the chunks of one weight; those of rows are lists of one tensor per chunk."""

    not_finite: int = 0
    zeros: int = 0
    ends: int = 0
    flushed: int = 0
    energy: float = 0.0
    own_energy: float = 0.0
    rows: list[Tensor] = field(default_factory=list)
    ideal_rows: list[Tensor] = field(default_factory=list)
    ideal_scales: list[Tensor] = field(default_factory=list)


def measure(weight: QuantizedWeight, parent: Tensor | None = None) -> WeightFigures:
    """Measure a decoded weight, beside its parent where there is one."""
    sums = _Sums()
    for start, chunk in weight.chunks():
        stop = start + len(chunk.elements)
        _add(sums, chunk, None if parent is None else parent[start:stop].float())
    count = weight.elements.numel()
    figures = WeightFigures(
        count=count,
        not_finite=sums.not_finite,
        zero_share=sums.zeros / count if count else 0.0,
        unused_codes=_unused_codes(weight),
        at_ends_share=sums.ends / count if count else 0.0,
        scales=_scale_figures(weight, _median_ratio(weight, sums)),
    )
    return figures if parent is None else _beside(figures, sums, count)


def _add(sums: _Sums, weight: QuantizedWeight, parent: Tensor | None) -> None:
    low, high = element_range(weight.element)
    elements = weight.float_elements()
    weight = replace(weight, elements=elements, unit=1.0)
    values = weight.values()
    norms = torch.linalg.vector_norm(values, dim=1)
    if not bool(norms.isfinite().all()):
        finite = values.isfinite()
        sums.not_finite += int((~finite).sum())
        values = torch.where(finite, values, 0.0)
        norms = torch.linalg.vector_norm(values, dim=1)
    zeros = values.numel() - int(values.count_nonzero())
    sums.zeros += zeros
    if low < 0:
        sums.ends += int((elements.abs() >= high).count_nonzero())
    else:
        sums.ends += int(((elements <= low) | (elements >= high)).count_nonzero())
    if parent is None:
        return
    ideal, ideal_scales = ideal_values(weight, parent)
    sums.ideal_scales.append(ideal_scales)
    if zeros:
        sums.flushed += int(((values == 0) & (ideal != 0)).count_nonzero())
    sums.energy += float(torch.linalg.vector_norm(parent).double().square())
    sums.own_energy += float(norms.double().square().sum())
    sums.rows.append(_squared_rows(values.sub_(parent)))
    sums.ideal_rows.append(_squared_rows(ideal.sub_(parent)))


def _squared_rows(difference: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return norms.double().square()


def _beside(figures: WeightFigures, sums: _Sums, count: int) -> WeightFigures:
    """Add the figures that compare a weight with its parent."""
    rows, ideal_rows = torch.cat(sums.rows), torch.cat(sums.ideal_rows)
    total, least, energy = float(rows.sum()), float(ideal_rows.sum()), sums.energy
    norms = (sums.own_energy * energy) ** 0.5
    ratios = rows / ideal_rows.clamp(min=1e-12 * energy / len(rows) + 1e-300)
    row = int(ratios.argmax())
    return replace(
        figures,
        error=total / energy if energy else 0.0,
        cosine=(sums.own_energy + energy - total) / 2 / norms if norms else 0.0,
        over_ideal_db=ratio_db(total, least, energy),
        worst_row=(row, float(PER_DB * torch.log10(ratios[row].clamp(min=1e-30)))),
        flushed_share=sums.flushed / count if count else 0.0,
    )


def over_codes_db(weight: QuantizedWeight, parent: Tensor) -> float:
    """Return the error over that of the nearest codes at the stored scales."""
    scales = weight.scales[:, None, :, None]
    usable = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
    zeros = 0.0 if weight.zero_points is None else weight.zero_points[:, None, :, None]
    codes = round_to(weight.element, weight.in_tiles(parent) / usable + zeros)
    nearest = weight.from_tiles((codes - zeros) * torch.where(scales.isfinite(), scales, 0.0))
    total, least, energy = (
        float(x.square().sum(dtype=torch.float64))
        for x in (weight.values().nan_to_num(0, 0, 0) - parent, nearest - parent, parent)
    )
    return ratio_db(total, least, energy)


def ratio_db(total: float, least: float, energy: float) -> float:
    """Return an error over another one in dB; rounding of float32 is no error."""
    floor = 1e-13 * energy
    return PER_DB * math.log10(total / max(least, floor)) if total > floor else 0.0


def _median_ratio(weight: QuantizedWeight, sums: _Sums) -> float | None:
    if not sums.ideal_scales:
        return None
    ideal = torch.cat(sums.ideal_scales)
    if ideal.shape != weight.scales.shape:
        return None
    both = (weight.scales > 0) & (ideal > 0) & weight.scales.isfinite()
    if not bool(both.any()):
        return None
    return float((weight.scales[both] / ideal[both]).log2().median())


def _unused_codes(weight: QuantizedWeight) -> int:
    """Count the values of the element format that no element has, of formats up to 4 bits."""
    if weight.element == "fp4_e2m1":
        listed = torch.from_numpy(get(weight.element).values()) / weight.unit
    elif weight.element in ("int4", "uint4", "int2", "uint2"):
        low, high = element_range(weight.element)
        listed = torch.arange(low, high + 1)
    else:
        return 0
    row = weight.elements.reshape(-1)
    for part in (row[:SAMPLE], row):
        unused = sum(not bool((part == value).any()) for value in listed.tolist())
        if not unused:
            break
    return unused


def _scale_figures(weight: QuantizedWeight, log2_ratio: float | None) -> ScaleFigures:
    scales = weight.scales
    finite = scales[scales.isfinite()]
    return ScaleFigures(
        count=scales.numel(),
        not_finite=int((~scales.isfinite()).sum()),
        zero=int((scales == 0).sum()),
        negative=0 if weight.signed_scales else int((scales < 0).sum()),
        smallest=float(finite.min()) if finite.numel() else float("nan"),
        largest=float(finite.max()) if finite.numel() else float("nan"),
        all_equal=scales.numel() > 1 and bool((scales == scales.reshape(-1)[0]).all()),
        log2_ratio=log2_ratio,
    )
