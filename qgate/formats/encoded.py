"""Encode tensors as codes and scales, and decode them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.formats._work import DOUBLE, CastContext, widen
from qgate.formats.engine.dtypes import INPUTS, combine, narrow
from qgate.formats.engine.job import Job, layout_of, split
from qgate.formats.options import NanPolicy
from qgate.formats.settings import QuantizerSettings
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.formats.engine import rotation as rotation
else:
    rotation = LateModule("qgate.formats.engine.rotation")


@dataclass(frozen=True)
class Encoded:
    """The codes and scales of one tensor.

    codes         one code per element in x's shape: uint8, int8 for integers, uint16 for fp16, bf16
    dtype         the dtype that `decode` returns by default
    scales        one per group, x's shape with the groups in place of the elements they cover:
                  codes of the scale type (uint8) in block formats other than codebooks, float32
                  otherwise (float64 for float64 tensors); None for a plain cast
    zero_points   the code of 0 in each group, in the dtype of the codes; None where it is 0
    tensor_scale  NVFP4's float32 scale of the whole tensor, or one for each row
    micro         HiF4's one-bit levels, three bytes per block: of its octets, its quads 0-7, 8-15;
                  of GGUF's IQ types the code of each tile's scale
    """

    quantizer: QuantizerSettings
    codes: Tensor
    dtype: torch.dtype
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    micro: Tensor | None = None
    zero_points: Tensor | None = None
    double: bool = False

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values: equal to `quantize` of the encoded tensor."""
        q, dtype = self.quantizer, dtype or self.dtype
        if q.rotation is not None and dtype in INPUTS:
            values = replace(self, quantizer=rotation.without_rotation(q)).decode(torch.float64)
            return rotation.rotated_back(values, q, dtype)
        if dtype not in INPUTS:
            allowed = ", ".join(map(str, INPUTS))
            raise TypeError(f"cannot decode to {dtype!r}; allowed: {allowed}.")
        layout = layout_of(self.codes, q)
        data = layout.arrange(self.codes)
        out = layout.empty(dtype, data.device)
        stored = {}
        rows_of = {"scales": self.scales, "micro": self.micro, "zero_points": self.zero_points}
        for name, shaped in rows_of.items():
            if shaped is not None:
                stored[name] = shaped.reshape(
                    layout.outer, layout.groups, q.format.stored[name], layout.inner
                )
        state = None if self.tensor_scale is None else widen(self.tensor_scale)
        if state is not None and state.dim():
            by_rows = state.reshape(layout.outer, 1, 1, layout.inner)
            state = by_rows.expand(-1, layout.groups, -1, -1)
        for chunk in layout.chunks(data.device, parts_of_groups=False, fixed=False):
            rows = {name: chunk.group(value) for name, value in stored.items()}
            of_chunk = chunk.group(state) if state is not None and state.dim() else state
            context = CastContext(q, DOUBLE, self.double, of_chunk)
            fmt, in_chunk = q.format, chunk.data(data)
            if fmt.kind == "block":
                elements = fmt.from_codes(in_chunk, rows)
            else:
                elements = fmt.from_codes(in_chunk, DOUBLE)
            if "zero_points" in rows:
                elements = elements - rows["zero_points"]
            if rows:
                scale = q.format.unscale(rows, context)[:, :, : elements.shape[2]]
                value = combine(elements, scale, dtype, context)
            else:
                value = narrow(elements, dtype)
            chunk.data(out).copy_(value)
        return layout.restore(out)

    def __getstate__(self) -> dict[str, object]:
        """Return the fields; torch pickles no uint16 tensor, so such codes travel as int16."""
        wide = self.codes.dtype == torch.uint16
        return self.__dict__ | {"codes": self.codes.view(torch.int16) if wide else self.codes}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        codes = state["codes"]  # no format has codes of int16
        wide = codes.dtype == torch.int16
        self.__dict__.update(state, codes=codes.view(torch.uint16) if wide else codes)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.codes.shape)) or "scalar"
        return f"Encoded({self.quantizer.format.name}, {shape}, {self.codes.device})"


def encode_tensor(x: Tensor, q: QuantizerSettings, nan: NanPolicy) -> Encoded:
    """Encode a checked tensor; `nan` says what to store where the format has no NaN."""
    x, element, fmt, dtype = x.detach(), q.format.element, q.format, q.dtype or x.dtype
    x = x if q.rotation is None else rotation.rotated(x, q)
    stores_nan = fmt.kind == "block" or fmt.nan_code is not None
    holes = x.isnan() if nan != "error" and not stores_nan else None
    if holes is not None:
        x = x.masked_fill(holes, 0.0)
    elif not stores_nan:
        count = int(x.isnan().sum())
        if count:
            raise QgateError(
                f"{fmt.name} has no NaN and x has {count}; "
                "encode(..., nan='max') or nan='zero' stores that instead."
            )
    job = Job(x, q)
    layout = job.layout
    codes = layout.empty(element.code_dtype(), x.device)
    stored: dict[str, Tensor] = {}
    if fmt.kind == "block":
        dtypes = {"scales": getattr(torch, fmt.stored_dtype)}
        stored = {
            name: job.rows(k, dtypes.get(name, torch.uint8)) for name, k in fmt.stored.items()
        }
    for chunk, _, _, parts in split(job):
        zero = parts.zero_point
        if fmt.kind == "block":
            chunk.data(codes).copy_(fmt.to_codes(parts))
        else:
            above = parts.elements if zero is None else parts.elements + zero
            chunk.data(codes).copy_(element.to_codes(above, DOUBLE))
        for name, rows in stored.items():
            stored_rows = parts.stored[name]
            single = rows.dtype == torch.float32 and stored_rows.dtype == torch.float64
            chunk.group(rows).copy_(narrow(stored_rows, rows.dtype) if single else stored_rows)
    codes = layout.restore(codes)
    if holes is not None and nan == "max":
        largest = element.to_codes(x.new_full((1,), element.max, dtype=torch.float64), DOUBLE)
        codes[holes] = largest.to(codes.device)
    if job.scale is not None:
        stored["scales"] = narrow(job.scale, torch.float64 if job.double else torch.float32)
    if job.zero_point is not None:
        stored["zero_points"] = job.zero_point.to(element.code_dtype())
    state = None if fmt.kind == "block" and fmt.by_blocks else job.state
    if state is not None and fmt.kind == "block":
        state = narrow(fmt.tensor_scale(state), torch.float32)
        if fmt.by_rows:
            axis = q.axis_of(x.dim())
            shape = [1 if dim == axis else size for dim, size in enumerate(x.shape or (1,))]
            state = state[:, :1].reshape(shape)
    shaped = {name: job.shaped(rows) for name, rows in stored.items()}
    return Encoded(
        q, codes, dtype, tensor_scale=state, double=job.double,
        **{name: shaped.get(name) for name in ("scales", "micro", "zero_points")},
    )  # fmt: skip
