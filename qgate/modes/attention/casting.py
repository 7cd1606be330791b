"""Casts of the tensors of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qgate import formats
from qgate.errors import QgateError
from qgate.formats import Quantizer
from qgate.modes.attention.choices import TensorChoice


class StoredSide(nn.Module):
    """The cast of one tensor, (batch, heads, tokens, width), such as keys that are stored."""

    def __init__(self, choice: TensorChoice | None, quantizer: Quantizer | None) -> None:
        super().__init__()
        self.choice, self.quantizer = choice, quantizer

    def forward(self, x: Tensor) -> Tensor:
        if self.quantizer is None or self.choice is None:
            return x
        if self.choice.share != "token":
            return self.quantizer(x)
        # One scale for all heads of a token: they stand side by side.
        heads = x.shape[1]
        joined = self.quantizer(x.transpose(1, 2).flatten(2))
        return joined.unflatten(2, (heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return repr(self.quantizer)


def quantizer_of(
    choice: TensorChoice, heads: int, width: int, ranges: list[float], rotated: bool = False
) -> Quantizer:
    """Return the quantizer of a choice; `ranges` are calibrated ones, one or one per head."""
    options = dict(choice.options)
    if rotated:
        # The largest power of two that divides the width: 32 of 96.
        options["rotation"] = [1] * (width & -width)
    if choice.share == "unit":
        scale = 1 / largest_value(choice.format)
        return Quantizer(choice.format, scale=scale, saturated_grad="pass", **options)
    if choice.is_static:
        scales = [reach / largest_value(choice.format) for reach in ranges]
        if choice.share == "tensor":
            return Quantizer(choice.format, scale=scales[0], saturated_grad="pass", **options)
        return Quantizer(
            choice.format, scale=torch.tensor(scales), granularity="channel", axis=1,
            saturated_grad="pass", **options,
        )  # fmt: skip
    if choice.share == "format":
        return Quantizer(choice.format, axis=-1, saturated_grad="pass", **options)
    block = {"token": heads * width, "token_head": width}.get(choice.share, 0)
    block = block or min(choice.group, width)
    if width % block and choice.share == "group":
        raise QgateError(
            f"groups of {block} channels do not divide heads of {width}: choose another group."
        )
    return Quantizer(
        choice.format, granularity="block", block=block, axis=-1, saturated_grad="pass", **options
    )


def largest_value(fmt: str) -> float:
    """Return the largest magnitude of an element format, to which a calibrated range is scaled."""
    named = formats.get(fmt)
    if named.kind != "element":
        raise QgateError(
            f"{fmt} has scales of its own blocks; calibrated scales are for element formats such "
            "as fp8_e4m3 and int8. Take share 'format'."
        )
    return float(named.element.max)
