"""Single numbers to an element format's, as they are or by scales found before."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qgate.kernels.launching import bits, launch, tile
from qgate.kernels.shapes import Grid, Lie, kind_of, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 4096
_WIDE = 128


@dataclass(frozen=True)
class ElementCast:
    grid: Grid
    scaled: bool

    def takes(self, lie: Lie) -> bool:
        return not self.scaled or lie.groups == 1 or lie.block <= LONGEST

    def run(self, x: Tensor, out: Tensor, lie: Lie, scales: Tensor | None) -> None:
        """Contiguous tensors, and a float64 scale per block in the order of the tensor."""
        programs = importlib.import_module("qgate.kernels.programs.elements")
        room = tile()
        constants: dict[str, Any] = {
            **self.grid.constants,
            "KIND": kind_of(x.dtype),
            "OUT": kind_of(out.dtype),
        }
        if scales is None:
            n, wide = x.numel(), not self.grid.fits_single
            launch(
                programs.cast_flat, -(-n // room), bits(x), bits(out), n, TILE=room, WIDE=wide,
                **constants,
            )  # fmt: skip
            return
        given: tuple[Any, ...] = (bits(out), scales, lie.length)
        if lie.upright:
            shared = lie.groups == 1
            high = max(room // min(power_of_two(lie.inner), _WIDE), 1)
            cut = Lie(lie.outer, lie.length, lie.inner, high if shared else lie.block)
            launch(
                programs.cast_columns, cut.programs(room), bits(x), *given, cut.groups, lie.inner,
                SHARED=shared, BLOCK=cut.block, PADDED=cut.padded, COLUMNS=cut.across(room),
                **constants,
            )  # fmt: skip
        elif lie.groups == 1:
            room = min(room, power_of_two(lie.length))
            pieces = lie.outer * -(-lie.length // room)
            launch(programs.cast_long_rows, pieces, bits(x), *given, TILE=room, **constants)
        else:
            launch(
                programs.cast_rows, lie.programs(room), bits(x), *given, lie.groups,
                lie.outer * lie.groups, BLOCK=lie.block, PADDED=power_of_two(lie.block),
                ROWS=lie.across(room), TAIL=lie.kind[1], **constants,
            )  # fmt: skip
