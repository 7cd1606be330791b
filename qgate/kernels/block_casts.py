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

    def run(self, x: Tensor, out: Tensor, lie: Lie) -> None:
        """Contiguous [outer, length, inner] tensors."""
        _run(
            "mx", x, out, lie, _cuts(lie), MANTISSA=self.grid.mantissa, LOWEST=self.grid.lowest,
            HIGHEST=self.grid.highest, LARGEST=self.grid.largest, CARRY=self.carry,
            LIMIT=self.limit, ROUNDING=ROUNDINGS[self.grid.rounding],
            SIGNED_ZERO=self.grid.signed_zero, INF_SATURATES=self.inf_saturates,
        )  # fmt: skip


@dataclass(frozen=True)
class Nvfp4Cast:
    """In two passes; the first finds the largest finite magnitude."""

    rounding: Rounding
    inf_saturates: bool

    def run(self, x: Tensor, out: Tensor, lie: Lie) -> None:
        programs = importlib.import_module("qgate.kernels.programs.nvfp4")
        room, n = tile(), x.numel()
        amax = x.new_zeros(1, dtype=torch.int32)
        launch(
            programs.largest_finite, -(-n // room), bits(x), amax, n, TILE=room,
            KIND=kind_of(x.dtype),
        )  # fmt: skip
        _run(
            "nvfp4", x, out, lie, _cuts(lie), amax, ROUNDING=ROUNDINGS[self.rounding],
            INF_SATURATES=self.inf_saturates,
        )  # fmt: skip


@dataclass(frozen=True)
class Hif4Cast:
    rounding: Rounding
    inf_saturates: bool

    def run(self, x: Tensor, out: Tensor, lie: Lie) -> None:
        _run(
            "hif4", x, out, lie, {}, ROUNDING=ROUNDINGS[self.rounding],
            INF_SATURATES=self.inf_saturates,
        )  # fmt: skip


BlockCast = MxCast | Nvfp4Cast | Hif4Cast


def _cuts(lie: Lie) -> dict[str, Any]:
    """How blocks of any length are cut; those of HiF4 have one."""
    cuts = {"BLOCK": lie.block, "PADDED": power_of_two(lie.block)}
    return cuts if lie.upright else cuts | {"TAIL": lie.kind[1]}


def _run(
    family: str, x: Tensor, out: Tensor, lie: Lie, cuts: dict[str, Any], *more: Tensor,
    **constants: Any,
) -> None:  # fmt: skip
    programs = importlib.import_module(f"qgate.kernels.programs.{family}")
    across, count = lie.across(tile()), lie.programs(tile())
    constants |= cuts | {"KIND": kind_of(x.dtype), "OUT": kind_of(out.dtype)}
    given: tuple[Any, ...] = (bits(x), bits(out), *more, lie.length, lie.groups)
    if lie.upright:
        launch(programs.quantize_columns, count, *given, lie.inner, COLUMNS=across, **constants)
    else:
        blocks = lie.outer * lie.groups
        launch(programs.quantize_rows, count, *given, blocks, ROWS=across, **constants)
