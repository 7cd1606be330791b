"""Measure one tensor in the formats that people choose between, each at its best scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qgate.formats import Format, Quantizer, get
from qgate.stats import BlockCounts, Counts, Values, errors, massive_beyond
from qgate.sweeps.compute import sweep
from qgate.sweeps.formats import has_mx
from qgate.sweeps.record import FormatChoice, SweepRecord, SweepView, metric, sqnr_without_massive

FORMATS = (
    "int8", "fp8_e4m3", "fp8_e5m2", "hif8",
    "mxint8", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "nvfp4",
)  # fmt: skip


def format_choices(
    x: Tensor,
    values: Counts | Values,
    blocks: Callable[[], BlockCounts | Counts | Values],
    records: Sequence[SweepRecord],
    *,
    scale_bits: int,
    block: int,
    axis: int,
) -> list[FormatChoice]:
    """Return a choice per format; `records` are sweeps of the tensor that need not run again."""
    views = {view.format["name"]: view for view in map(SweepView, records)}
    choices = []
    for fmt in map(get, FORMATS):
        if fmt.name not in views:
            if fmt.kind == "block" and not has_mx(fmt):
                choices.append(_direct_choice(x, fmt, axis))
                continue
            is_block = fmt.kind == "block"
            swept = sweep(
                blocks() if is_block else values,
                fmt.name,
                levels=1,
                granularity="block" if is_block else "tensor",
                scale_bits=scale_bits,
                block=block,
                axis=axis,
            )
            views[fmt.name] = SweepView(swept.record)
        choices.append(_swept_choice(views[fmt.name], fmt))
    return choices


def _swept_choice(view: SweepView, fmt: Format) -> FormatChoice:
    return {
        "format": fmt.name,
        "bits": fmt.bits,
        "scale": view.scale_text,
        "sqnr_db": metric(view.best, "sqnr_db"),
        "rest_db": sqnr_without_massive(view.best),
    }


def _direct_choice(x: Tensor, fmt: Format, axis: int) -> FormatChoice:
    """Measure a format whose scales nobody chooses, on the tensor itself."""
    numbers = x if x.dtype.itemsize > 1 else x.float()
    numbers = torch.where(numbers.isfinite(), numbers, 0.0)
    quantized = Quantizer(fmt, axis=axis)(numbers)
    small = numbers.abs() <= massive_beyond(numbers)
    return {
        "format": fmt.name,
        "bits": fmt.bits,
        "scale": "blocks",
        "sqnr_db": errors(quantized, numbers).metric("sqnr_db"),
        "rest_db": errors(quantized[small], numbers[small]).metric("sqnr_db"),
    }
