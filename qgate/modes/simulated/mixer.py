"""The W8A8 Mamba mixer: the parts of the float one under the same names, on integer grids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from qgate.arithmetic import divided
from qgate.models.mamba.hadamard import transform
from qgate.models.mamba.network import MambaMixer
from qgate.models.mamba.scanning import Scan, ScanResult
from qgate.modes.mode import MambaChoices
from qgate.modes.simulated.casts import (
    HIGH,
    Cast,
    DynamicCast,
    GridCast,
    Rounding,
    half,
    straight_through,
)
from qgate.modes.simulated.paths import PATHS
from qgate.modes.simulated.products import (
    Arithmetic,
    FloatLinear,
    HalfLinear,
    IntConv,
    IntLinear,
    IntWeight,
    SplitLinear,
)


@dataclass(frozen=True)
class MixerScales:
    """The static scales of one mixer, named after their use."""

    norm: float
    xz: float
    u: float
    x_proj: float
    delta: float
    state: float
    out: float
    u_wide: float


class SimulatedMixer(nn.Module):
    """A replacement of a rotated MambaMixer that shares and trains its parameters."""

    def __init__(
        self, source: MambaMixer, scales: MixerScales, choices: MambaChoices, arithmetic: Arithmetic
    ) -> None:
        super().__init__()
        rounding = choices.conv_rounding
        self.split, self.choices, self.scales = source.split, choices, scales
        self.A_log, self.D, self.dt_bias = source.A_log, source.D, source.dt_proj.bias
        self.A_codes = IntWeight(source.A_log, clamped=False)
        self.D_codes = IntWeight(source.D, clamped=False)
        self.bias_codes = IntWeight(source.dt_proj.bias, clamped=False)
        self.in_cast = GridCast(scales.norm, "even")
        reads = SplitLinear if choices.dynamic_conv else IntLinear
        self.in_proj = reads(source.in_proj, scales.norm, scales.xz, "outside", arithmetic)
        self.conv_cast: nn.Module = DynamicCast("even") if choices.dynamic_conv else nn.Identity()
        self.conv1d = IntConv(source.conv1d, arithmetic)
        self.act = SlowSiLU()
        self.u_cast = GridCast(scales.u, rounding)
        # Where both paths read the same codes, u_cast makes them once.
        self.path_b: nn.Module | None = None
        if (choices.path_a, choices.path_b) != ("codes", "codes"):
            self.path_b = path_b(choices.path_b, scales.u, rounding, scales.u_wide)
        self.x_proj: nn.Module
        self.dt_proj: nn.Module
        if choices.float_products:
            self.x_proj = FloatLinear(source.x_proj, arithmetic)
            self.dt_proj = FloatLinear(source.dt_proj, arithmetic)
        else:
            self.x_proj = IntLinear(source.x_proj, scales.u, scales.x_proj, "inside", arithmetic)
            self.dt_proj = IntLinear(
                source.dt_proj, scales.x_proj, scales.delta, "outside", arithmetic
            )
        put_back = choices.regridded != "none"
        self.x_cast: nn.Module = GridCast(scales.x_proj, "even") if put_back else nn.Identity()
        self.dt_cast: nn.Module = GridCast(scales.delta, "even") if put_back else nn.Identity()
        self.scan = HalfScan(choices.scan)
        self.hadamard = IntHadamard(source.D.numel(), scales.out)
        self.out_proj = HalfLinear(source.out_proj, scales.out, 1.0, "inside", arithmetic)

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(self.in_cast(hidden)).chunk(2, -1)
        scale: float | Tensor = self.scales.xz
        if self.choices.dynamic_conv:
            x, scale = self.conv_cast(x)
        y = self.act(self.conv1d(x, scale))
        a, u = self._paths(y)
        product = self.x_proj(a)
        dt, B, C = self.x_cast(product).split(self.split, -1)
        if self.choices.regridded == "scan":
            dt = product[..., : self.split[0]]
        scanned, _ = self.scan(
            u=u,
            dt=self.dt_cast(self.dt_proj(dt)),
            B=B,
            C=C,
            z=z,
            A_log=self.A_codes.dequantized(),
            D=self.D_codes.dequantized(),
            dt_bias=self.bias_codes.dequantized(),
        )
        return cast(Tensor, self.out_proj(self.hadamard(scanned)))

    def _paths(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of x_proj and the u of the scan."""
        if self.path_b is None:
            codes = self.u_cast(y)
            return codes, codes
        u = self.path_b(y)
        if self.choices.path_a == "u":
            return u, u
        return self.u_cast(y if self.choices.path_a == "codes" else u), u


class SlowSiLU(nn.Module):
    """y / (1 + exp(-y)), as the kernel of the convolution computes it."""

    def forward(self, y: Tensor) -> Tensor:
        return y / (1 + torch.exp(-y))


class UPath(Cast):
    """The u of the scan where it is more than the codes; clipped values are counted."""

    def __init__(self, name: str, scale: float, rounding: Rounding, wide: float) -> None:
        super().__init__(rounding)
        self.name, self.scale, self.wide = name, scale, wide

    def forward(self, y: Tensor, rounding: Rounding | None = None) -> Tensor:
        plain = y.detach()
        value = PATHS[self.name](plain, self.scale, rounding or self.rounding, self.wide)
        # Rounding moves by half a step; float32 adds a little to that.
        passed = (value - plain).abs() <= 0.5001 * self._step(plain)
        self.values += y.numel()
        self.nonfinite = self.nonfinite + (~plain.isfinite()).count_nonzero()
        self.saturated = self.saturated + (~passed & ~plain.isnan()).count_nonzero()
        return straight_through(y, value, passed)

    def _step(self, y: Tensor) -> Tensor | float:
        """Return the widest step; an error beyond half of it is not rounding but clipping."""
        if self.name == "powers":
            return 2 * y.abs()
        if self.name == "second_grid":
            largest = torch.where(y.isnan(), 0, y.abs()).amax()
            return divided(largest, HIGH).clamp(min=self.scale)
        if self.name == "wide_grid":
            return max(self.scale, self.wide)
        return 4 * self.scale if self.name == "three_zones" else self.scale

    def extra_repr(self) -> str:
        return f"{self.name}, scale={self.scale:g}, rounding={self.rounding!r}"


def path_b(name: str, scale: float, rounding: Rounding, wide: float) -> nn.Module:
    """Return the module that makes u of y."""
    if name == "exact":
        return nn.Identity()
    if name == "codes":
        return GridCast(scale, rounding)
    return UPath(name, scale, rounding, wide)


class HalfScan(Scan):
    """The scan in float32 with its output rounded to float16."""

    def forward(self, *args: Any, **kwargs: Any) -> ScanResult:
        y, state = super().forward(*args, **kwargs)
        return ScanResult(straight_through(y, half(y.detach())), state)


class IntHadamard(nn.Module):
    """The run-time Hadamard transform, rounded to codes of out_proj's input.

    Quamba's kernel casts without a clamp; here values beyond the codes are clamped and counted.
    """

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.factor = 1 / math.sqrt(width) / scale
        self.cast = Cast("away")

    def forward(self, y: Tensor) -> Tensor:
        return cast(Tensor, self.cast(transform(y) * self.factor) * self.scale)


def casts_of(root: nn.Module) -> Mapping[str, Cast]:
    """Return every integer cast below a module, by name."""
    return {name: module for name, module in root.named_modules() if isinstance(module, Cast)}
