"""Tensors to codes and scales, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats._block import BlockFormat
from qgate.formats.encoded import Encoded
from qgate.formats.engine.job import Job, check, element_of, split
from qgate.formats.engine.layout import layout_of
from qgate.formats.engine.parts import Call
from qgate.formats.engine.quantizing import announce, combine
from qgate.formats.engine.work import DOUBLE, INPUTS, narrow, widen
from qgate.formats.quantizer import NanPolicy, Quantizer


def encode(x: Tensor, q: Quantizer, nan: NanPolicy) -> Encoded:
    check(x, q)
    announce(x, q)
    x, element = x.detach(), element_of(q.format)
    stores_nan = isinstance(q.format, BlockFormat) or q.format.nan_code is not None
    holes = x.isnan() if nan != "error" and not stores_nan else None
    if holes is not None:
        x = x.masked_fill(holes, 0.0)
    elif not stores_nan:
        count = int(x.isnan().sum())
        if count:
            raise QgateError(
                f"{q.format.name} has no NaN and x has {count}; "
                "encode(..., nan='max') or nan='zero' stores that instead."
            )
    job = Job(x, q)
    layout = job.layout
    codes = torch.empty(
        layout.outer, layout.length, layout.inner, dtype=element.code_dtype(), device=x.device
    )
    stored: dict[str, Tensor] = {}
    if isinstance(q.format, BlockFormat):
        stored = {name: job.rows(k, torch.uint8) for name, k in q.format.stored.items()}
    for chunk, _, _, parts in split(job):
        chunk.data(codes).copy_(element.to_codes(parts.elements, DOUBLE))
        for name, rows in stored.items():
            chunk.group(rows).copy_(parts.stored[name])
    codes = layout.restore(codes)
    if holes is not None and nan == "max":
        largest = element.to_codes(x.new_full((1,), element.max, dtype=torch.float64), DOUBLE)
        codes[holes] = largest.to(codes.device)
    if job.scale is not None:
        stored["scales"] = narrow(job.scale, torch.float64 if job.double else torch.float32)
    state = job.state
    if state is not None and isinstance(q.format, BlockFormat):
        state = narrow(q.format.tensor_scale(state), torch.float32)
    shaped = {name: job.shaped(rows) for name, rows in stored.items()}
    return Encoded(
        q, codes, job.dtype, shaped.get("scales"), state, shaped.get("micro"), double=job.double
    )


def decode(e: Encoded, dtype: torch.dtype | None) -> Tensor:
    q, dtype = e.quantizer, dtype or e.dtype
    if dtype not in INPUTS:
        allowed = ", ".join(str(each) for each in INPUTS)
        raise TypeError(f"cannot decode to {dtype!r}; allowed: {allowed}.")
    element, layout = element_of(q.format), layout_of(e.codes, q)
    data = layout.arrange(e.codes)
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    stored = {}
    rows_of = q.format.stored if isinstance(q.format, BlockFormat) else {"scales": 1}
    for name, shaped in (("scales", e.scales), ("micro", e.micro)):
        if shaped is not None:
            stored[name] = shaped.reshape(layout.outer, layout.groups, rows_of[name], layout.inner)
    state = None if e.tensor_scale is None else widen(e.tensor_scale)
    for chunk in layout.chunks(data.device, parts_of_groups=False, fixed=False):
        rows = {name: chunk.group(value) for name, value in stored.items()}
        call = Call(q, DOUBLE, e.double, state)
        elements = element.from_codes(chunk.data(data), DOUBLE)
        if rows:
            scale = q.format.unscale(rows, call)[:, :, : elements.shape[2]]
            value = combine(elements, scale, dtype, call)
        else:
            value = narrow(elements, dtype)
        chunk.data(out).copy_(value)
    return layout.restore(out)
