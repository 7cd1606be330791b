"""Values that a reference quantizes inside, each place with a name: stages of a fused kernel.

`qgate.testing.quantized` is one operator. In a plain call it gives the values of its format. In a
call of a `StagedFunction` it gives what that says: other values of a stage, none at all, or codes
that stay what they were while float noise moves everything else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Values = Callable[[Tensor], Tensor]
Key = str | tuple[str, int]
"""A stage, or one of its calls."""


@dataclass(frozen=True)
class StageCast:
    """The cast of a stage: values in float64, and the scale of each of them."""

    values: Values
    scales: Callable[[Tensor], Tensor | None] = lambda _x: None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the quantized values in the dtype of the tensor."""
        return self.values(x).to(x.dtype)


@dataclass
class StageRun:
    """One call of a reference: what its stages do, and what they did.

    casts     name → what the stage makes of a tensor, (name, number) that of one call; None to pass
              all values on as they are
    offsets   what each call of a stage adds to its values, in place of a cast
    declared  name → what the reference declares for it
    names     the stage of each call; `inputs` the values that it got, `results` what it gave
    """

    casts: Mapping[Key, StageCast] | None = None
    offsets: Sequence[Tensor] | None = None
    keeps: bool = False
    declared: dict[str, Any] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def cast_of(self, name: str, declared: Any, x: Tensor) -> StageCast:
        """Return what the next call of a stage does."""
        if self.declared.setdefault(name, declared) != declared:
            raise ValueError(
                f"stage {name!r} is declared twice: as {self.declared[name]} and as {declared}; "
                "give each place a name of its own, or both the same format."
            )
        number = len(self.names)
        self.names.append(name)
        if self.offsets is not None:
            offset = self.offsets[number % len(self.offsets)] if self.offsets else None
            if offset is not None and offset.shape == x.shape:
                return StageCast(lambda x: x.double() + offset)
            return StageCast(torch.clone)
        if self.casts is None:
            return StageCast(torch.clone)
        if name not in self.casts:
            raise ValueError(
                f"stage {name!r} is quantized at this input and not at the example; give an "
                "example for which the reference quantizes at every place."
            )
        return self.casts.get((name, self.names.count(name) - 1)) or self.casts[name]


_RUN: ContextVar[StageRun | None] = ContextVar("stage_run", default=None)
_CALLS: dict[int, tuple[StageCast, StageRun | None]] = {}
"""What each operator does that is running now, by its number."""
_numbers = itertools.count()


def stage_cast(number: int) -> StageCast:
    """Return what an operator does that is running now."""
    return _CALLS[number][0]


def _quantized(x: Tensor, call: int) -> Tensor:
    calls: dict[int, tuple[StageCast, StageRun | None]] = sys.modules[__name__]._CALLS
    cast, run = calls[call]
    result = cast(x)
    if run is not None and run.keeps:
        run.inputs.append(x.double())
        run.results.append(result.double())
    return result


if not hasattr(torch.ops.qgate, "quantized"):  # else this module was imported before, and removed
    _library = torch.library.Library("qgate", "FRAGMENT")
    _library.define("quantized(Tensor x, int call) -> Tensor")
    _library.impl("quantized", _quantized, "CompositeExplicitAutograd")
QUANTIZED = torch.ops.qgate.quantized.default
"""The operator of all stages, as modes see it."""
OPERATOR, BEFORE_CAST = "quantized", "quantized.before"
"""Names of the quantized values, and of those that are quantized, which may be rounded before."""


class _StraightThrough(torch.autograd.Function):
    """Quantize; the gradient passes as it is."""

    @staticmethod
    def forward(_context: Any, x: Tensor, call: int) -> Tensor:
        return QUANTIZED(x, call)  # type: ignore[no-any-return]

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def quantize_stage(name: str, x: Tensor, declared: Any, plain: Values) -> Tensor:
    """Quantize values as the running reference says, or by `plain` in a call of its own."""
    run = _RUN.get()
    cast = StageCast(plain) if run is None else run.cast_of(name, declared, x)
    number = next(_numbers)
    _CALLS[number] = cast, run
    try:
        result: Tensor = _StraightThrough.apply(x, number)  # type: ignore[no-untyped-call]
        return result
    finally:
        del _CALLS[number]


class StagedFunction:
    """A reference with stages, and what these do in its calls.

    casts    as in a run
    offsets  what each call of a stage adds to its values, in place of a cast
    last     the run of the last call, if inputs and results of stages are kept
    """

    def __init__(
        self,
        function: Function,
        casts: Mapping[Key, StageCast] | None = None,
        offsets: Sequence[Tensor] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.casts, self.offsets, self.keeps = function, casts, offsets, keeps
        self.last = StageRun()

    def __call__(self, *arguments: Any) -> Any:
        with self._running():
            return self.function(*arguments)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.last = StageRun(self.casts, self.offsets, self.keeps)
        token = _RUN.set(self.last)
        try:
            yield
        finally:
            _RUN.reset(token)

    @property
    def inside(self) -> Function | None:
        """Return how the function is evaluated with the result of each operator moved, if at all.

        Not each function says how.
        """
        moved: Function | None = getattr(self.function, "inside", None)
        if moved is None:
            return None

        def running(*arguments: Any) -> Any:
            with self._running():
                return moved(*arguments)

        return running

    def passing(self) -> StagedFunction:
        """Return the function without any quantization inside."""
        is_passing = self.casts is None and self.offsets is None
        return self if is_passing else StagedFunction(self.function)

    def keeping(self) -> StagedFunction:
        """Return the function, which keeps what its stages get and give in `last`."""
        return StagedFunction(self.function, self.casts, self.offsets, keeps=True)

    def with_cast(self, key: Key, cast: StageCast) -> StagedFunction:
        """Return the function with another cast at one stage, or at one call of it."""
        return StagedFunction(self.function, {**(self.casts or {}), key: cast})

    def held(self) -> StagedFunction:
        """Return the function whose stages add what they added in the last call, which was kept."""
        pairs = zip(self.last.results, self.last.inputs, strict=True)
        return StagedFunction(self.function, offsets=[q - x for q, x in pairs], keeps=True)


def stage_slot(name: str) -> str:
    """Return the key of a stage among what is quantized."""
    return f"stage {name}"


def without_stages(like: Function) -> Function:
    """Return a function as it was before its stages were known."""
    return like.function if isinstance(like, StagedFunction) else like


def without_casts(like: Function) -> Function:
    """Return a function that quantizes nothing inside."""
    return like.passing() if isinstance(like, StagedFunction) else like
