"""Undo what readers do to scales of one byte: take their codes for those of another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight, decode_e8m0
from qgate.formats import get
from qgate.formats.choosing import ChoosingFormat

LEADING = 1 << 20
"""Elements in leading rows that tell the size of all scales."""
CHOOSING = "if4", "mixfp4"
"""Formats of packed FP4 whose blocks have another grid where the sign bit of their scale is set."""
Change = Callable[[QuantizedWeight], QuantizedWeight | None]


def _decode_ue5m3(codes: Tensor) -> Tensor:
    table = torch.tensor(get("fp8_ue5m3").element.code_values(), dtype=torch.float32)
    return table[codes.int()]


SCALE_CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "E4M3": lambda codes: codes.view(torch.float8_e4m3fn).float(),
    "E8M0": decode_e8m0,
    "UE5M3": _decode_ue5m3,
}
"""Formats of one byte that scales of blocks have, and what their codes are."""


def scales_of_other_formats(
    weight: QuantizedWeight, parent: Tensor
) -> Iterator[tuple[str, Change]]:
    """Yield scales of one byte that are read in another format than theirs, in words, and undone.

    The scale of the whole tensor belongs to the format that is read, so the parent tells it.
    """
    assert weight.scale_codes is not None
    codes = weight.scale_codes.contiguous().view(torch.uint8)
    stored = "E8M0" if weight.scale_codes.dtype == torch.uint8 else "E4M3"
    if bool((codes == codes.reshape(-1)[:1]).all()):
        return
    count = min(len(weight.elements), -(-LEADING // max(1, weight.shape[1])))
    for meant, decode in SCALE_CODES.items():
        scales = decode(codes)
        if meant == stored or not bool(scales.isfinite().all()) or not bool((scales > 0).any()):
            continue
        # Where no code is subnormal, E4M3 and UE5M3 differ by a factor, which is another fault.
        ratios = (scales / weight.scales)[weight.scales != 0]
        if ratios.numel() and float(ratios.max()) <= 1.001 * float(ratios.min()):
            continue
        values = replace(weight, scales=scales).rows(0, count).values().double()
        product = (values * parent[:count].double()).sum()
        factor = float(product / values.square().sum().clamp(min=1e-300))
        words = f"scales are codes of {meant}, and are read as {stored}"
        yield words, partial(_with_scales, scales=scales * factor)
    if weight.element == "fp4_e2m1" and stored == "E4M3" and bool((codes >= 128).any()):
        for name in CHOOSING:
            words = f"the sign bit of scales chooses a grid ({name}), and is read as a sign"
            yield words, partial(_on_grids, name=name)


def _with_scales(weight: QuantizedWeight, scales: Tensor) -> QuantizedWeight:
    return replace(weight, scales=scales)


def _on_grids(weight: QuantizedWeight, name: str) -> QuantizedWeight:
    """Read each block whose scale is negative on the second grid of a format."""
    fmt = get(name)
    assert isinstance(fmt, ChoosingFormat)
    tiles = weight.in_tiles(weight.float_elements())
    codes = fmt.element.sorted_values.searchsorted(tiles.numpy())
    on_second = torch.tensor(fmt.second_values(), dtype=torch.float32)[
        fmt.element.sorted_codes[codes]
    ]
    is_second = (weight.scales < 0)[:, None, :, None]
    elements = weight.from_tiles(on_second.where(is_second, tiles))
    return replace(weight, elements=elements, scales=weight.scales.abs(), unit=1.0)
