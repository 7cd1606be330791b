"""Figures of one quantized weight: its error beside that of an ideal quantizer, and its scales.

The ideal quantizer has the same elements and tiles, and scales made from the parent. Codes that are
nearest to the parent at the stored scales tell faults of codes from faults of scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight, decode_e8m0, spread
from qgate.checkpoints.record import ScaleFigures, WeightFigures
from qgate.formats import get

PER_DB = 10.0


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
        return x.round().clamp(low, high)
    if element == "fp4_e2m1":
        magnitude = x.abs().clamp(max=high)
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        return torch.copysign((magnitude / step).round() * step, x)
    dtype = torch.float8_e5m2 if element == "fp8_e5m2" else torch.float8_e4m3fn
    return x.clamp(low, high).to(dtype).float()


def tiles_of(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return the elements of each tile along the last axis: tile rows x tile columns x elements."""
    rows, columns = x.shape
    height, width = min(tile[0], rows), min(tile[1], columns)
    pad = (0, -columns % width, 0, -rows % height)
    padded = torch.nn.functional.pad(x, pad, value=0.0) if any(pad) else x
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return blocks.transpose(1, 2).flatten(2)


def ideal_values(weight: QuantizedWeight, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return what an ideal quantizer of the same elements and tiles makes of the parent.

    Its scales are returned, too.
    """
    rows, columns = parent.shape
    blocks = tiles_of(parent, weight.tile)
    low, high = element_range(weight.element)
    if weight.zero_points is not None:
        smallest, largest = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
        scales = ((largest - smallest) / (high - low)).clamp(min=torch.finfo(torch.float32).tiny)
        zeros = (low - smallest / scales).round().clamp(low, high)
        at = [spread(figures, weight.tile, rows, columns) for figures in (scales, zeros)]
        codes = round_to(weight.element, parent / at[0] + at[1])
        return (codes - at[1]) * at[0], scales
    scales = _symmetric_scales(weight, blocks.abs().amax(2), high)
    at_scales = spread(scales, weight.tile, rows, columns)
    return round_to(weight.element, parent / at_scales) * at_scales, scales


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
        whole = (weight.scales / torch.where(stored == 0, torch.nan, stored)).nanmedian(1, True)[0]
        whole = torch.where(whole.isfinite() & (whole > 0), whole, 1.0)
        scales = round_to("fp8_e4m3", amax / largest / whole) * whole
    return torch.where(scales > 0, scales, 1.0)


def measure(weight: QuantizedWeight, parent: Tensor | None = None) -> WeightFigures:
    """Measure a decoded weight, beside its parent where there is one."""
    values = weight.values()
    low, high = element_range(weight.element)
    ends = (weight.elements <= low) | (weight.elements >= high)
    finite = values.isfinite()
    error = cosine = over_ideal = over_codes = flushed = None
    worst: tuple[int, float] | None = None
    log2_ratio: float | None = None
    if parent is not None:
        energy = float(parent.double().square().sum())
        ideal, ideal_scales = ideal_values(weight, parent)
        usable = values.nan_to_num(0, 0, 0)
        norms = float(usable.norm() * parent.norm())
        cosine = float((usable * parent).sum()) / norms if norms else 0.0
        rows = (usable - parent).square().sum(1, dtype=torch.float64)
        ideal_rows = (ideal - parent).square().sum(1, dtype=torch.float64)
        total, least = float(rows.sum()), float(ideal_rows.sum())
        error = total / energy if energy else 0.0
        over_ideal = _ratio_db(total, least, energy)
        over_codes = _ratio_db(total, _nearest_codes_error(weight, parent), energy)
        ratios = rows / ideal_rows.clamp(min=1e-12 * energy / len(rows) + 1e-300)
        row = int(ratios.argmax())
        worst = row, float(PER_DB * torch.log10(ratios[row].clamp(min=1e-30)))
        flushed = float(((values == 0) & (ideal != 0)).float().mean())
        if weight.scales.shape == ideal_scales.shape:
            both = (weight.scales > 0) & (ideal_scales > 0) & weight.scales.isfinite()
            if bool(both.any()):
                quotient = weight.scales[both] / ideal_scales[both]
                log2_ratio = float(quotient.log2().median())
    return WeightFigures(
        count=values.numel(),
        not_finite=int((~finite).sum()),
        zero_share=float((values == 0).float().mean()),
        unused_codes=_unused_codes(weight),
        at_ends_share=float(ends.float().mean()),
        scales=_scale_figures(weight, log2_ratio),
        error=error,
        cosine=cosine,
        over_ideal_db=over_ideal,
        over_codes_db=over_codes,
        worst_row=worst,
        flushed_share=flushed,
    )


def _nearest_codes_error(weight: QuantizedWeight, parent: Tensor) -> float:
    scales = weight.spread(weight.scales)
    usable = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
    zeros = 0.0 if weight.zero_points is None else weight.spread(weight.zero_points)
    codes = round_to(weight.element, parent / usable + zeros)
    nearest = (codes - zeros) * torch.where(scales.isfinite(), scales, 0.0)
    return float((nearest - parent).square().sum(dtype=torch.float64))


def _ratio_db(total: float, least: float, energy: float) -> float:
    """Return an error over another one in dB; rounding of float32 is no error."""
    floor = 1e-13 * energy
    if total <= floor:
        return 0.0
    return float(PER_DB * torch.log10(torch.tensor(total / max(least, floor), dtype=torch.float64)))


def _unused_codes(weight: QuantizedWeight) -> int:
    """Count the values of the element format that no element has, of formats up to 4 bits."""
    if weight.element in ("fp4_e2m1",):
        codes = torch.arange(-6, 6.5, 0.5)
        listed = codes[round_to("fp4_e2m1", codes) == codes]
    elif weight.element in ("int4", "uint4", "int2", "uint2"):
        low, high = element_range(weight.element)
        listed = torch.arange(low, high + 1)
    else:
        return 0
    present = weight.elements.unique()
    return int((~torch.isin(listed, present)).sum())


def _scale_figures(weight: QuantizedWeight, log2_ratio: float | None) -> ScaleFigures:
    scales = weight.scales
    finite = scales[scales.isfinite()]
    return ScaleFigures(
        count=scales.numel(),
        not_finite=int((~scales.isfinite()).sum()),
        zero=int((scales == 0).sum()),
        negative=int((scales < 0).sum()),
        smallest=float(finite.min()) if finite.numel() else float("nan"),
        largest=float(finite.max()) if finite.numel() else float("nan"),
        all_equal=scales.numel() > 1 and bool((scales == scales.reshape(-1)[0]).all()),
        log2_ratio=log2_ratio,
    )
