"""Linear layers and the convolution on integer codes, accumulated exactly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from qgate.arithmetic import divided
from qgate.models.fingerprints import WeightCache
from qgate.models.mamba.network import StepProjection, causal_conv
from qgate.modes.simulated.casts import Cast, codes_on_grid, half, straight_through

Arithmetic = Literal["fp32", "fp16"]

# Sums of this many products of two codes are whole numbers that float32 holds exactly.
_EXACT = 1024


class IntWeight:
    """Codes and scale of a weight: symmetric, one scale, absmax / 127.

    They follow the weight: a changed weight, or a pass with gradients, makes them again. "fp16"
    rounds scale and quotient to float16, as the tools of Quamba's kernels do.
    """

    def __init__(
        self, weight: Tensor, arithmetic: Arithmetic = "fp32", clamped: bool = True
    ) -> None:
        self.weight = weight
        self.arithmetic = arithmetic
        self.low, self.high = (-128.0, 127.0) if clamped else (-torch.inf, torch.inf)
        self._codes = WeightCache(self._quantized)

    def quantized(self) -> tuple[Tensor, Tensor]:
        """Return the codes (float32, whole numbers) and the scale."""
        return self._codes(self.weight)

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        values = weight.detach()
        if self.arithmetic == "fp16":
            low = values.half()
            scale = divided(low.abs().amax().clamp(min=1e-5), 127).clamp(min=2.0**-24)
            k = (low / scale).float()
            scale = scale.float()
        else:
            scale = divided(values.abs().amax().clamp(min=1e-5), 127)
            k = values / scale
        codes = k.round().clamp(self.low, self.high)
        return straight_through(weight / scale, codes), scale

    def dequantized(self) -> Tensor:
        codes, scale = self.quantized()
        return codes * scale


class _OnGrid(nn.Module):
    def __init__(self, codes: IntWeight) -> None:
        super().__init__()
        self.codes = codes

    def forward(self, _weight: Tensor) -> Tensor:
        return self.codes.dequantized()


def register_codes(module: nn.Module, codes: IntWeight) -> IntWeight:
    """Let the module's weight read as the values of its codes, for captures."""
    parametrize.register_parametrization(module, "weight", _OnGrid(codes), unsafe=True)
    return codes


def exact_linear(codes: Tensor, weight: Tensor) -> Tensor:
    """Compute the integer matrix product, rounded to float32 once at the end."""
    if codes.shape[-1] <= _EXACT:
        return linear(codes, weight)
    parts = zip(codes.split(_EXACT, -1), weight.split(_EXACT, -1), strict=True)
    return sum(
        (linear(x, w).double() for x, w in parts),
        start=torch.zeros((), dtype=torch.float64, device=codes.device),
    ).float()


class IntLinear(nn.Module):
    """INT8 in, INT8 weight, exact sums; the output goes to its own INT8 grid.

    `order` is the position of the weight's scale in the two kernels: "outside" is
    w_s * (ratio * sum), "inside" ratio * (w_s * sum), with ratio = s_in / s_out. A single row takes
    the kernel for vectors, which rounds half away from zero.
    """

    def __init__(
        self,
        source: nn.Linear,
        s_in: float,
        s_out: float,
        order: Literal["outside", "inside"],
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.codes = register_codes(self, IntWeight(source.weight, arithmetic))
        self.s_in, self.s_out, self.order = s_in, s_out, order
        self.biased = source.bias is not None and not isinstance(source, StepProjection)
        self.cast = Cast("even")

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the integer sums for x on the input grid, and the weight's scale."""
        weight, scale = self.codes.quantized()
        return exact_linear(codes_on_grid(x, self.s_in), weight), scale

    def forward(self, x: Tensor) -> Tensor:
        sums, scale = self.sums(x)
        return self.requantized(sums, scale, self.bias if self.biased else None)

    def requantized(self, sums: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ratio = self.s_in / self.s_out
        single = sums.shape[:-1].numel() == 1
        if single:
            k = divided(scale * self.s_in, self.s_out) * sums
        else:
            k = scale * (ratio * sums) if self.order == "outside" else ratio * (scale * sums)
        k = k if bias is None else k + divided(bias, self.s_out)
        return self.cast(k, "away" if single else None) * self.s_out  # type: ignore[no-any-return]


class SplitLinear(IntLinear):
    """in_proj of a dynamic convolution: one half leaves in float32, the other on the grid."""

    def forward(self, x: Tensor) -> Tensor:
        sums, scale = self.sums(x)
        first, second = sums.chunk(2, -1)
        biases = self.bias.chunk(2) if self.biased else (None, None)
        real = scale * (self.s_in * first)
        real = real if biases[0] is None else real + biases[0]
        return torch.cat([real, self.requantized(second, scale, biases[1])], -1)


class FloatLinear(nn.Module):
    """A float32 product with the weight on its INT8 grid."""

    def __init__(self, source: nn.Linear, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.codes = register_codes(self, IntWeight(source.weight, arithmetic))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.codes.dequantized())


class HalfLinear(IntLinear):
    """out_proj: INT8 in, float16 out."""

    def forward(self, x: Tensor) -> Tensor:
        sums, scale = self.sums(x)
        y = self.s_in * (scale * sums)
        return half(y if self.bias is None else y + self.bias)


class IntConv(nn.Module):
    """The convolution on codes; its output is float32 and not rounded yet."""

    def __init__(self, source: nn.Conv1d, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.codes = register_codes(self, IntWeight(source.weight, arithmetic))
        self.bias_codes = None if source.bias is None else IntWeight(source.bias, arithmetic)

    def forward(self, x: Tensor, scale: float | Tensor) -> Tensor:
        weight, weight_scale = self.codes.quantized()
        y = (weight_scale * scale) * causal_conv(codes_on_grid(x, scale), weight, None)
        if self.bias_codes is None:
            return y
        bias, bias_scale = self.bias_codes.quantized()
        return y + bias * bias_scale
