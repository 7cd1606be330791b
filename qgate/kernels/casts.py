"""Casts of single numbers and of blocks with their scales, each in one kernel or in two."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from qgate.kernels.launching import Step, interpreted
from qgate.kernels.shapes import (
    ROUNDINGS,
    TILINGS,
    Grid,
    MemoryLayout,
    Rounding,
    Tiling,
    kind_of,
    power_of_two,
)

if TYPE_CHECKING:
    from torch import Tensor

    Run = Callable[[Tensor, Tensor, "Tensor | None"], None]

LONGEST = 4096
FITS = 8192
"""Elements of a row that one program holds, to read it once."""
_LONG_ROW = 1024
"""Elements of a row that a program tries the ties of its scale for."""
_MOST_BITS, _MOST_TIES = 3, 6
"""Bits after the leading one that HiF8 has, and that are worth trying."""
_PLANNED = 32
_WIDE = 128
_GIVEN, _AMAX, _OWN = 0, 1, 2
_X_OUT, _X_AMAX, _ALL = (0, 1), (0, 2), (0, 1, 2)
_X_OUT_PLANS, _SCALES_PLANS = (0, 1, 3), (2, 3)


def tiling(work: str) -> Tiling:
    """Return the tiling of a program; the interpreter is faster with more elements."""
    return replace(TILINGS[work], elements=2**16) if interpreted() else TILINGS[work]


@dataclass(frozen=True)
class ElementCast:
    """A cast of single numbers, without a scale, with given ones, or `own` made from each group."""

    grid: Grid
    scaled: bool
    own: bool = False
    inf_saturates: bool = False

    def takes(self, memory: MemoryLayout) -> bool:
        return not self.scaled or memory.groups == 1 or memory.block <= LONGEST

    def prepare(self, memory: MemoryLayout, dtype: torch.dtype, out: torch.dtype) -> Run:
        """Return the cast of contiguous x to `out`; it takes a float32 scale per group, or None."""
        programs = importlib.import_module("qgate.kernels.programs.elements")
        grid = self.grid
        constants: dict[str, object] = {"KIND": kind_of(dtype), "OUT": kind_of(out)}
        constants |= grid.constants
        source: dict[str, object] = {"SOURCE": _GIVEN, "INF_SATURATES": self.inf_saturates}
        if not self.scaled:
            n, cut = memory.outer * memory.length * memory.inner, tiling("flat")
            flat = Step(
                programs.cast_flat, -(-n // cut.elements), _X_OUT, (n, *grid.numbers), cut.warps,
                TILE=cut.elements, **constants,
            )  # fmt: skip
            return lambda x, y, _: flat(x, y)
        ties = self.ties(memory, dtype)
        if memory.upright:
            return self._upright(memory, dtype, source, constants)
        if memory.groups > 1 or memory.length <= FITS:
            cut = tiling("rows")
            tile = memory.padded if ties else cut.elements
            warps = max(cut.warps * tile // cut.elements, 1)
            if not ties:
                warps = max(cut.warps, memory.padded // 1024)
            if self.own:
                source["SOURCE"] = _OWN
            count = memory.outer * memory.groups
            rows = Step(
                programs.cast_rows, memory.programs(tile), _ALL,
                (memory.length, memory.groups, count, memory.block, *grid.numbers), warps,
                PADDED=memory.padded, ROWS=memory.across(tile), TAIL=memory.kind[1],
                **source, **constants, TIES=ties,
            )  # fmt: skip
            return _with(rows)
        cut = tiling("long rows")
        if self.own:
            source["SOURCE"] = _AMAX
        pieces = memory.outer * -(-memory.length // cut.elements)
        last = Step(
            programs.cast_long_rows, pieces, _ALL, (memory.length, *grid.numbers), cut.warps,
            TILE=cut.elements, **source, **constants, TIES=ties,
        )  # fmt: skip
        largest = _largest_rows(memory, dtype, finite=False) if self.own else None
        return _with(last) if largest is None else _after(largest, last, memory.outer)

    def _upright(
        self,
        memory: MemoryLayout,
        dtype: torch.dtype,
        source: dict[str, object],
        constants: dict[str, object],
    ) -> Run:
        """Return the cast with a scale for each column, or for each block of one."""
        programs = importlib.import_module("qgate.kernels.programs.elements")
        cut, grid = tiling("columns"), self.grid
        shared = memory.groups == 1
        high = max(cut.elements // min(power_of_two(memory.inner), _WIDE), 1)
        count = memory.outer * memory.inner
        if self.own:
            source["SOURCE"] = _AMAX if shared else _OWN
        ties = self.ties(memory, dtype)
        if ties:
            across = min(power_of_two(memory.inner), _WIDE)
            pieces = -(-memory.length // (high * cut.tiles)) * -(-memory.inner // across)
            last = Step(
                programs.cast_tall, memory.outer * pieces, _X_OUT_PLANS,
                (memory.length, memory.inner, count, *grid.numbers), cut.warps, HIGH=high,
                COLUMNS=across, TILES=cut.tiles, SOURCE=source["SOURCE"], **constants,
            )  # fmt: skip
        else:
            part = replace(memory, block=high) if shared else memory
            last = Step(
                programs.cast_columns, part.programs(cut.elements), _ALL,
                (memory.length, part.groups, memory.inner, part.block, *grid.numbers), cut.warps,
                SHARED=shared, PADDED=part.padded, COLUMNS=part.across(cut.elements), **source,
                **constants,
            )  # fmt: skip
        largest = _largest_columns(memory, dtype) if self.own and shared else None
        return self._in_steps(count, largest, last, ties, source, constants)

    def ties(self, memory: MemoryLayout, dtype: torch.dtype) -> int:
        """Return how many ties of one exponent a program tries, 0 where that takes too long."""
        mantissa = _MOST_BITS if self.grid.tapered else self.grid.mantissa
        if not self.scaled:
            return 0
        if dtype.itemsize > 2 or not self.grid.is_single or mantissa > _MOST_TIES:
            return 0
        if memory.upright:
            # Columns of fp16 often have a scale with both cases of `nudge_of`.
            return 2 ** (mantissa + 1) if memory.groups == 1 and dtype == torch.bfloat16 else 0
        longer = memory.groups == 1 and memory.length > FITS
        return 2 ** (mantissa + 1) if longer or memory.padded >= _LONG_ROW else 0

    def _in_steps(
        self,
        groups: int,
        largest: Step | None,
        last: Step,
        ties: int,
        source: dict[str, object],
        constants: dict[str, object],
    ) -> Run:
        """Return the largest magnitudes of groups, their plans and the cast, as far as needed."""
        if not ties:
            return _with(last) if largest is None else _after(largest, last, groups)
        programs = importlib.import_module("qgate.kernels.programs.elements")
        at_once = min(power_of_two(groups), _PLANNED)
        plan = Step(
            programs.plan_groups, -(-groups // at_once), _SCALES_PLANS,
            (groups, self.grid.largest), 4, GROUPS=at_once, SOURCE=source["SOURCE"],
            INF_SATURATES=source["INF_SATURATES"], KIND=constants["KIND"], OUT=constants["OUT"],
            ROUNDING=constants["ROUNDING"], TIES=ties,
        )  # fmt: skip

        def run(x: Tensor, out: Tensor, scales: Tensor | None) -> None:
            plans = torch.empty(3 * groups, dtype=torch.float32, device=x.device)
            if largest is not None:
                scales = torch.zeros(groups, dtype=torch.int32, device=x.device)
                largest(x, out, scales)
            assert scales is not None
            plan(x, out, scales, plans)
            last(x, out, x, plans)

        return run


def _with(step: Step) -> Run:
    """Return a run with given scales; without them the program reads none."""
    return lambda x, out, scales: step(x, out, x if scales is None else scales)


def _after(first: Step, last: Step, groups: int) -> Run:
    """Return a run whose first step finds the largest magnitude of each group."""

    def run(x: Tensor, out: Tensor, _: Tensor | None) -> None:
        amax = torch.zeros(groups, dtype=torch.int32, device=x.device)
        first(x, out, amax)
        last(x, out, amax)

    return run


def _largest_rows(memory: MemoryLayout, dtype: torch.dtype, *, finite: bool) -> Step:
    programs = importlib.import_module("qgate.kernels.programs.magnitudes")
    cut = tiling("largest")
    pieces = memory.outer * -(-memory.length // (cut.elements * cut.tiles))
    return Step(
        programs.largest_rows, pieces, _X_AMAX, (memory.length,), cut.warps, TILE=cut.elements,
        TILES=cut.tiles, KIND=kind_of(dtype), FINITE=finite,
    )  # fmt: skip


def _largest_columns(memory: MemoryLayout, dtype: torch.dtype) -> Step:
    programs = importlib.import_module("qgate.kernels.programs.magnitudes")
    cut = tiling("largest")
    across = min(power_of_two(memory.inner), _WIDE)
    high = max(cut.elements // across, 1)
    pieces = -(-memory.length // (high * cut.tiles)) * -(-memory.inner // across)
    return Step(
        programs.largest_columns, memory.outer * pieces, _X_AMAX, (memory.length, memory.inner),
        cut.warps, HIGH=high, COLUMNS=across, TILES=cut.tiles, KIND=kind_of(dtype),
    )  # fmt: skip


class BlockCast(abc.ABC):
    """A cast of blocks with one scale each, of [outer, length, inner] tensors."""

    family: ClassVar[str]
    any_block: ClassVar[bool] = True
    """True if blocks have any length; those of HiF4 have one."""
    has_short_columns: ClassVar[bool] = True
    """True if a program of its own takes blocks that are upright and short."""
    rounding: Rounding
    inf_saturates: bool

    def prepare(self, memory: MemoryLayout, dtype: torch.dtype, out: torch.dtype) -> Run:
        """Return the cast of contiguous x to `out`, which takes no scales."""
        step = self.step(memory, dtype, out, _X_OUT)
        return lambda x, y, _: step(x, y)

    def step(
        self, memory: MemoryLayout, dtype: torch.dtype, out: torch.dtype, slots: tuple[int, ...]
    ) -> Step:
        programs = importlib.import_module(f"qgate.kernels.programs.{self.family}")
        short = memory.short and self.has_short_columns
        cut = tiling(f"{self.family} columns" if short else self.family)
        constants: dict[str, object] = {}
        across, count = memory.across(cut.elements), memory.programs(cut.elements)
        if self.any_block:
            constants = {"BLOCK": memory.block}
            if not short:
                constants["PADDED"] = memory.padded
        constants["COLUMNS" if memory.upright else "ROWS"] = across
        if not memory.upright:
            constants["TAIL"] = memory.kind[1]
        constants |= {"KIND": kind_of(dtype), "OUT": kind_of(out), **self.constants()}
        constants["INF_SATURATES"] = self.inf_saturates
        last = memory.inner if memory.upright else memory.outer * memory.groups
        kind = "short_columns" if short else "columns" if memory.upright else "rows"
        program = getattr(programs, f"quantize_{kind}")
        numbers = (memory.length, memory.groups, last, *self.numbers())
        return Step(program, count, slots, numbers, cut.warps, **constants)

    def numbers(self) -> tuple[float, ...]:
        """Return what the program takes beside the memory layout."""
        return ()

    def constants(self) -> dict[str, object]:
        """Return what the program is compiled for, in the order of its parameters."""
        return {"ROUNDING": ROUNDINGS[self.rounding]}


@dataclass(frozen=True)
class MxCast(BlockCast):
    """`carry` is added to the bits of the block's amax so that its exponent is the rule's."""

    grid: Grid
    carry: int
    limit: int
    inf_saturates: bool

    family = "mx"

    @property
    def rounding(self) -> Rounding:  # type: ignore[override]
        return self.grid.rounding

    def numbers(self) -> tuple[float, ...]:
        grid = self.grid
        return (*grid.numbers[:3], grid.highest, self.carry, self.limit)

    def constants(self) -> dict[str, object]:
        grid = self.grid
        return {"FIXED": grid.fixed, **super().constants(), "SIGNED_ZERO": grid.signed_zero}


@dataclass(frozen=True)
class Nvfp4Cast(BlockCast):
    """A cast in two passes, of which the first finds the largest finite magnitude."""

    rounding: Rounding
    inf_saturates: bool
    bound: float = 2688.0
    largest: float = 448.0
    lowest: int = -6

    family = "nvfp4"

    def numbers(self) -> tuple[float, ...]:
        return self.bound, self.largest

    def constants(self) -> dict[str, object]:
        return {"LOWEST": self.lowest, **super().constants()}

    def prepare(self, memory: MemoryLayout, dtype: torch.dtype, out: torch.dtype) -> Run:
        size = memory.outer * memory.length * memory.inner
        first = _largest_rows(MemoryLayout(1, size, 1, size), dtype, finite=True)
        return _after(first, self.step(memory, dtype, out, _ALL), 1)


@dataclass(frozen=True)
class ChoosingCast(Nvfp4Cast):
    """A cast whose blocks of 16 each take one of two grids.

    grids      bits after the leading one and lowest exponent of both, -1 and 0 for integers
    factors    what the numbers of a block are divided and multiplied by for the second scale; its
               unit and 1 / unit; the largest of its elements
    """

    grids: tuple[tuple[int, int], tuple[int, int]] = ((1, 0), (1, 0))
    factors: tuple[float, float, float, float, float] = (6.0, 1.5, 1.0, 1.0, 6.0)
    first_largest: float = 6.0
    one_zero: bool = False
    squares: bool = True
    second_wins: bool = False

    family = "choosing"
    has_short_columns = False

    def numbers(self) -> tuple[float, ...]:
        return self.bound, self.first_largest, *self.factors

    def constants(self) -> dict[str, object]:
        (mantissa, lowest), (second_mantissa, second_lowest) = self.grids
        return {
            "MANTISSA": mantissa, "LOWEST": lowest, "SECOND_MANTISSA": second_mantissa,
            "SECOND_LOWEST": second_lowest, "HAS_UNIT": self.factors[2] != 1,
            "ONE_ZERO": self.one_zero, "SQUARES": self.squares, "SECOND_WINS": self.second_wins,
        }  # fmt: skip


@dataclass(frozen=True)
class Hif4Cast(BlockCast):
    """A cast of blocks of 64 with finer levels."""

    rounding: Rounding
    inf_saturates: bool

    family = "hif4"
    any_block = False
