"""The pieces a quantizer takes a tensor apart into, and what its kernels are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.formats.engine.work import Work
    from qgate.formats.quantizer import Quantizer


@dataclass
class Parts:
    """A chunk [outer, blocks, block, inner] as float64 elements on the grid times a float64 scale.

    `ratios` are the elements before they were rounded: x in units of its scale, as the format
    divides. `stored` holds what `encode` keeps besides the element codes, one row per block in the
    third dimension ("scales", and "micro" for the finer levels of HiF4).
    """

    elements: Tensor
    scale: Tensor
    ratios: Tensor
    stored: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """What a kernel has to know: the options, the float type, and what was found out before.

    `state` is the scale of an element format, or what a block format keeps for the whole tensor;
    `numel` the size of the whole tensor, of which a kernel sees one chunk at a time.
    """

    q: Quantizer
    work: Work
    double: bool
    state: Tensor | None = None
    numel: int = 0

    def divide(self, x: Tensor, scale: Tensor) -> Tensor:
        """x / scale in float64, good for one more rounding (`work.divide`)."""
        from qgate.formats.engine import work

        return work.divide(x, scale, exact=self.double)

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        """x * factor in float64, good for one more rounding (`work.multiply`)."""
        from qgate.formats.engine import work

        return work.multiply(x, factor, exact=self.double)
