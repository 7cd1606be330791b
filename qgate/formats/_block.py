"""The base of block formats: elements whose scale is shared block by block."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeGuard

import numpy as np

from qgate.formats._element import ElementFormat
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, WorkType
from qgate.formats.options import CastOptions, Floats, Rounding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockFormat(abc.ABC):
    """Elements that share a scale block by block; figures are in units of the block's scale."""

    name: str
    element: ElementFormat

    kind: ClassVar[Literal["block"]] = "block"
    always_scaled: ClassVar[bool] = True
    options: ClassVar[frozenset[str]]
    scale: ClassVar[str]
    default_block: ClassVar[int]
    stored_dtype: ClassVar[str] = "uint8"

    @property
    def bits(self) -> int:
        return self.element.bits

    @property
    @abc.abstractmethod
    def notes(self) -> str: ...

    @property
    def stored(self) -> dict[str, int]:
        """Return how many numbers each block stores besides codes, by name."""
        return {"scales": 1}

    @property
    def layout(self) -> str:
        return self.element.layout

    @property
    def block(self) -> int:
        return self.default_block

    @property
    def by_rows(self) -> bool:
        """True if `prepare` gets the largest magnitude of each row along the axis of blocks."""
        return False

    @property
    def takes_tiles(self) -> bool:
        """True if zeros that fill up a short tile do not change its scale."""
        return True

    @property
    def default_rule(self) -> str:
        """The scale rule of a quantizer without one."""
        return "floor"

    @property
    def rounding(self) -> Rounding:
        return self.element.rounding

    @property
    def max(self) -> float:
        return self.element.max

    @property
    def min_normal(self) -> float:
        return self.element.min_normal

    @property
    def min_subnormal(self) -> float:
        return self.element.min_subnormal

    def values(self) -> Floats:
        """Return all values of an element, ascending, in units of the block's scale."""
        return self.element.values()

    def prepare(self, amax: Tensor) -> Tensor | None:
        """Return what `split` needs of the whole tensor, from its largest finite magnitude."""
        del amax
        return None

    def tensor_scale(self, state: Tensor) -> Tensor:
        """Return the part of the state that `encode` stores, as float64."""
        return state

    needs_amax: ClassVar[bool] = False
    by_blocks: ClassVar[bool] = False
    """True if `prepare` gets the largest magnitude of each block, in their order."""

    @property
    def effort(self) -> int:
        """Times that the definition takes of what it takes for other formats."""
        return 1

    def with_share(self, share: float) -> BlockFormat | None:
        """Return the format with so many times its scales; None where a rule has none between."""
        del share
        return None

    @abc.abstractmethod
    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        """Split a float64 chunk into elements and scale, exactly as the format defines it."""

    @abc.abstractmethod
    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        """Return the float64 scale of `split` from its stored codes."""

    def to_codes(self, parts: ScaledChunk) -> Tensor:
        """Return the codes of elements that `split` made."""
        return self.element.to_codes(parts.elements, DOUBLE)

    def from_codes(self, codes: Tensor, stored: dict[str, Tensor]) -> Tensor:
        """Return the float64 elements of codes, whose blocks have these stored scales."""
        del stored
        return self.element.from_codes(codes, DOUBLE)

    @abc.abstractmethod
    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        """Quantize the rows of x, each one block, by the readable definition."""

    def define_stored(self, amax: Floats) -> Floats:
        """Return the scales of blocks in their order, where those of all are made together."""
        raise NotImplementedError

    def define_state(self, x: Floats) -> float | None:
        """Return what `prepare` does, by the readable definition."""
        del x
        return None


Format = ElementFormat | BlockFormat


def is_format(fmt: object) -> TypeGuard[Format]:
    """Tell whether an object is a format."""
    return isinstance(fmt, Format)


def non_finite(amax_bits: Tensor, context: CastContext) -> Tensor:
    """Find blocks whose scale is NaN: with a NaN, or with an Inf unless it saturates."""
    if context.q.inf == "saturate":
        return amax_bits > context.work.exponent_mask
    return amax_bits >= context.work.exponent_mask


def block_amax_bits(x: Tensor, work: WorkType) -> Tensor:
    return x.view(work.integer).bitwise_and(work.magnitude_mask).amax(2, keepdim=True)


def poisoned(x: Floats, q: CastOptions) -> np.ndarray:
    """Find the rows whose scale is NaN, by the readable definition."""
    bad = np.isnan(x) if q.inf == "saturate" else ~np.isfinite(x)
    return np.asarray(bad.any(axis=1))
