"""The encoded form of a tensor: element codes, scales, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qgate.formats.quantizer import Quantizer


@dataclass(frozen=True)
class Encoded:
    """What a format stores for one tensor.

    codes         one code per element in x's shape: uint8, int8 for integers, uint16 for fp16, bf16
    dtype         the dtype that `decode` returns unless told otherwise
    scales        one per group, x's shape with the groups in place of the elements they cover:
                  codes of the scale type (uint8) in block formats, float32 otherwise (float64 for
                  float64 tensors); None for a plain cast
    tensor_scale  NVFP4's float32 scale of the whole tensor
    micro         HiF4's one-bit levels, three bytes per block: of its octets, its quads 0-7, 8-15
    """

    quantizer: Quantizer
    codes: Tensor
    dtype: torch.dtype
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    micro: Tensor | None = None
    double: bool = False

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values again: equal to `quantize` of the tensor that was encoded."""
        from qgate.formats.engine import codec

        return codec.decode(self, dtype)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.codes.shape)) or "scalar"
        return f"Encoded({self.quantizer.format.name}, {shape}, {self.codes.device})"
