"""MX, NVFP4 and HiF4: what a block's numbers become, scale and all, in one kernel."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgate.kernels.launching import bits, launch, tile
from qgate.kernels.shapes import ROUNDINGS, Grid, Lie, Rounding, kind_of, power_of_two

LONGEST = 4096


@dataclass(frozen=True)
class MxCast:
    """`carry` is added to the bits of the block's amax so that its exponent is the rule's."""

    grid: Grid
    carry: int
    limit: int
    inf_saturates: bool
    name: str = "MX"

    def run(self, x: Tensor, out: Tensor, lie: Lie) -> None:
        """Contiguous [outer, length, inner] tensors."""
        _run(
            importlib.import_module("qgate.kernels.programs.mx"),
            x,
            out,
            lie,
            MANTISSA=self.grid.mantissa,
            LOWEST=self.grid.lowest,
            HIGHEST=self.grid.highest,
            LARGEST=self.grid.largest,
            CARRY=self.carry,
            LIMIT=self.limit,
            ROUNDING=ROUNDINGS[self.grid.rounding],
            SIGNED_ZERO=self.grid.signed_zero,
            INF_SATURATES=self.inf_saturates,
        )


@dataclass(frozen=True)
class Nvfp4Cast:
    """In two passes; the first finds the largest finite magnitude."""

    rounding: Rounding
    inf_saturates: bool
    name: str = "NVFP4"

    def run(self, x: Tensor, out: Tensor, lie: Lie) -> None:
        programs = importlib.import_module("qgate.kernels.programs.nvfp4")
        room, n = tile(), x.numel()
        amax = x.new_zeros(1, dtype=torch.int32)
        launch(
            programs.largest_finite, -(-n // room), bits(x), amax, n, TILE=room,
            KIND=kind_of(x.dtype),
        )  # fmt: skip
        options: dict[str, Any] = {
            "ROUNDING": ROUNDINGS[self.rounding],
            "INF_SATURATES": self.inf_saturates,
        }
        _run(programs, x, out, lie, amax, **options)


@dataclass(frozen=True)
class Hif4Cast:
    rounding: Rounding
    inf_saturates: bool
    name: str = "HiF4"

    def run(self, x: Tensor, out: Tensor, lie: Lie) -> None:
        programs = importlib.import_module("qgate.kernels.programs.hif4")
        across, count = lie.across(tile()), lie.programs(tile())
        options: dict[str, Any] = {
            "KIND": kind_of(x.dtype),
            "OUT": kind_of(out.dtype),
            "ROUNDING": ROUNDINGS[self.rounding],
            "INF_SATURATES": self.inf_saturates,
        }
        given: tuple[Any, ...] = (bits(out), lie.length, lie.groups)
        if lie.upright:
            launch(
                programs.quantize_columns,
                count,
                bits(x),
                *given,
                lie.inner,
                COLUMNS=across,
                **options,
            )
        else:
            blocks = lie.outer * lie.groups
            launch(programs.quantize_rows, count, bits(x), *given, blocks, ROWS=across, **options)


BlockCast = MxCast | Nvfp4Cast | Hif4Cast


def _run(programs: Any, x: Tensor, out: Tensor, lie: Lie, *more: Tensor, **constants: Any) -> None:
    across, count = lie.across(tile()), lie.programs(tile())
    constants |= {
        "BLOCK": lie.block,
        "PADDED": power_of_two(lie.block),
        "KIND": kind_of(x.dtype),
        "OUT": kind_of(out.dtype),
    }
    given: tuple[Any, ...] = (bits(out), *more, lie.length, lie.groups)
    if lie.upright:
        launch(
            programs.quantize_columns,
            count,
            bits(x),
            *given,
            lie.inner,
            COLUMNS=across,
            **constants,
        )
    else:
        launch(
            programs.quantize_rows, count, bits(x), *given, lie.outer * lie.groups, ROWS=across,
            TAIL=lie.kind[1], **constants,
        )  # fmt: skip
