"""A right kernel beside a wrong one, and words of the cause that the wrong one's failure names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import qgate
from qgate.testing import CheckReport, check_kernel

Kernel = Callable[..., Any]
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
GENERATOR = torch.Generator().manual_seed(48)
INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)
INT8_TENSOR = qgate.Quantizer("int8", granularity="tensor")
FP8 = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)
FP8_TENSOR = qgate.Quantizer("fp8_e4m3", granularity="tensor")
INT4 = qgate.Quantizer("int4", granularity="block", block=32)
EXAMPLE: dict[str, Any] = {"relations": ["permuted"]}
"""Options for a fault that the example shows."""


@dataclass(frozen=True)
class Pair:
    """A right and a wrong kernel of one function, and words for what is wrong."""

    name: str
    words: str
    right: Kernel
    wrong: Kernel
    arguments: tuple[Any, ...]
    like: Kernel
    inputs: dict[int, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: EXAMPLE)

    def check(self, kernel: Kernel) -> CheckReport:
        """Check one of the two kernels."""
        return check_kernel(
            kernel, *self.arguments, like=self.like, inputs=self.inputs, **self.options
        )


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = F32) -> Tensor:
    """Draw normal values."""
    return (torch.randn(*shape, generator=GENERATOR) * scale).to(dtype)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draw values between two numbers."""
    return torch.rand(*shape, generator=GENERATOR) * (high - low) + low


def cast(x: Tensor, fmt: Any) -> Tensor:
    """Quantize in float32; no elements stay none."""
    return qgate.quantize(x.float(), fmt) if x.numel() else x.float()


def rowwise(x: Tensor, largest: float = 127.0) -> tuple[Tensor, Tensor]:
    """Return int8 codes of each row and their scales, as a kernel makes them."""
    amax = x.float().abs().amax(-1, keepdim=True) if x.numel() else x.float()[..., :1]
    scale = torch.where(amax == 0, 1.0, amax / largest)
    return (x.float() / scale).round().clamp(-128, 127), scale
