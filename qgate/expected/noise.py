"""Results of a correct implementation: expected values, and the float noise around each.

The expected value is the reference function in float64, fed with ideally quantized inputs. Noise is
measured: the function runs again with every input moved at random by one rounding error of the
declared arithmetic. A sum of K terms may be added in any order, which grows the error by up to
sqrt(K)/2; docs/kernels.md shows both sides of the margins around that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qgate.arithmetic import divided
from qgate.expected.stages import StageCast, StagedFunction
from qgate.tensor_inputs import layout_reason

ARITHMETICS = {
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""The unit roundoff of each arithmetic that a kernel may declare."""
RUNS = 4
CODE_RUNS = 12
CODE_MARGIN = 6.0
"""Times the RMS effect of codes that noise decides: several of them may meet in one sum."""
REPETITIONS = 3
"""Calls of the same input, which are compared with each other."""
_FACTOR_SIGMAS = 6.0
MARGIN = 8.0
"""Times the noise of any order of summation: five standard deviations of a million elements."""
CODE_ROOM, SCALE_ROOM = 2.0**-21, 2.0**-17
"""Share of a value by which float32 may decide its code, and by which scales may move all codes."""
ANCHORED = 1 - 2.0**-10
"""Share of the largest ratio to a scale from which on a value is one that a scale is made of."""
FUNCTION_ROUNDINGS = 16.0
"""Rounding errors that elementary functions (exp, rsqrt, tanh) may add to a result."""

Function = Callable[..., Any]
Inside = Callable[[Sequence[Any], float, torch.Generator], Tensor]
"""Evaluates a function with the result of every operator moved by one rounding error."""


@dataclass(frozen=True)
class Expected:
    """Expected values in float64, and the smallest and largest that noise explains."""

    values: Tensor
    low: Tensor
    high: Tensor
    free: Tensor | None = None
    """Elements about which the format promises nothing, such as the block around a NaN."""
    sigma: Tensor | None = None
    """The effect of one rounding error of every input, without margin."""
    reach: Tensor | None = None
    """Elements that depend on a NaN or Inf of the arguments: how far it spreads there is free."""

    @classmethod
    def around(cls, values: Tensor, room: Tensor | float, sigma: Tensor | None = None) -> Expected:
        """Return values with as much room below as above."""
        return cls(values, values - room, values + room, sigma=sigma)

    def select(self, dim: int, index: Tensor) -> Expected:
        """Return the expected values of some entries of a dimension."""

        def taken(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.index_select(dim, index.to(values.device))

        sides = self.values, self.low, self.high
        values, low, high = (side.index_select(dim, index.to(side.device)) for side in sides)
        return Expected(values, low, high, *map(taken, (self.free, self.sigma, self.reach)))

    @property
    def width(self) -> Tensor:
        """Return half of what lies between the smallest and the largest value."""
        return (self.high - self.low) / 2

    def explains(self, actual: Tensor) -> bool:
        """Tell if noise explains all of `actual`."""
        return not bool(self.outside(actual).any())

    def bounds(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest result, rounded to `dtype`."""
        return self.low.to(dtype).double(), self.high.to(dtype).double()

    def outside(self, actual: Tensor) -> Tensor:
        """Return where `actual` is something that noise does not explain, as booleans."""
        low, high = self.bounds(actual.dtype)
        result = actual.double()
        inside = (result >= low) & (result <= high)
        inside |= (result == self.values) | (~result.isfinite() & self.values.isnan())
        if self.free is not None:
            inside |= self.free
        if self.reach is not None:
            lost = ~result.isfinite() & self.reach
            if bool(lost.any()):
                inside |= lost | self.reach & ~self.values.isfinite()
        return ~inside

    def excess(self, actual: Tensor) -> float:
        """Return how far `actual` lies outside the bounds in all, as a sum of squares."""
        low, high = self.bounds(actual.dtype)
        result = actual.double()
        beyond = torch.maximum(low - result, result - high).clamp_min_(0.0)
        return float(beyond.nan_to_num(0.0, 0.0, 0.0).square().sum())


def evaluate(
    like: Function, arguments: Sequence[Any], dtype: torch.dtype = torch.float64
) -> Tensor:
    """Call the reference function in float64, or in float32 where it takes nothing wider."""
    with plain_attention():
        try:
            result = like(*[_to_float(argument, dtype) for argument in arguments])
        except (RuntimeError, TypeError):
            result = like(*[_to_float(argument, torch.float32) for argument in arguments])
    return single_tensor(result, "the reference function").detach().double()


def plain_attention() -> contextlib.AbstractContextManager[None]:
    """Compute attention by products and a softmax, whose operators refuse what does not fit.

    Fused attention on the CPU reads and writes beyond keys and values of different lengths.
    """
    return sdpa_kernel(SDPBackend.MATH)


def single_tensor(result: Any, of: str) -> Tensor:
    """Return the only tensor of a result."""
    if isinstance(result, tuple | list) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        content = f"{type(result).__name__}"
        if isinstance(result, tuple | list):
            content += f" of {len(result)}"
        raise ValueError(
            f"{of} returned a {content}, not one tensor; wrap it in a function that returns the "
            "tensor to check."
        )
    if reason := layout_reason(result):
        raise ValueError(f"{of} returned {reason}")
    return result


def _to_float(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def expect(
    like: Function,
    arguments: Sequence[Any],
    *,
    alternatives: Sequence[tuple[Any, ...]] = (),
    arithmetic: str = "float32",
    seed: int = 0,
    values: Tensor | None = None,
    stage_ties: bool = False,
) -> Expected:
    """Evaluate `like` on ideal arguments and measure the noise of each element.

    values        what `like` gives for them, if that is known
    alternatives  (position, values, …): other values of an argument, whose codes noise may choose
    stage_ties    True if noise may choose codes of what `like` quantizes inside, too
    """
    values = evaluate(like, arguments) if values is None else values
    unit = ARITHMETICS[arithmetic]
    quantizing, like = like, with_held_codes(like, arguments)
    inside: Inside | None = getattr(like, "inside", None)
    generator = torch.Generator().manual_seed(seed)
    squares = torch.zeros_like(values)
    for _ in range(RUNS):
        near = [moved(argument, unit, generator) for argument in arguments]
        squares += (evaluate(like, near) - values).nan_to_num_(0.0, 0.0, 0.0).square_()
        if inside is not None:
            difference = inside(arguments, unit, generator) - values
            squares += difference.nan_to_num_(0.0, 0.0, 0.0).square_()
    sigma = smoothed(squares / RUNS).sqrt_()
    noise = sigma * (MARGIN * max(1.0, math.sqrt(longest_dimension(arguments)) / 2))
    # Functions lose digits where they cancel: gelu of -3 is as exact as gelu of 3.
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    typical = finite.square().mean(-1, keepdim=True).sqrt_() if values.dim() else finite.abs()
    if values.dim():  # a row that cancels to zero has the noise of what cancelled
        typical = torch.where(typical == 0, finite.square().mean().sqrt(), typical)
    noise += (values.abs() + typical) * (unit * FUNCTION_ROUNDINGS)
    for position, *codes in (entry for entry in alternatives if len(entry) > 1):
        noise += CODE_MARGIN * _code_noise(like, arguments, values, position, codes, generator)
    if stage_ties and isinstance(quantizing, StagedFunction):
        noise += CODE_MARGIN * _stage_noise(quantizing, arguments, values, unit, generator)
    noise = noise.nan_to_num_(0.0, 0.0, 0.0)
    return Expected.around(values, noise, sigma)


def with_held_codes(like: Function, arguments: Sequence[Any]) -> Function:
    """Return a function whose codes inside stay what they are at these arguments."""
    if not isinstance(like, StagedFunction):
        return like
    recording = like.keeping()
    evaluate(recording, arguments)
    return recording.held()


def noise_before_casts(
    like: StagedFunction, arguments: Sequence[Any], unit: float = ARITHMETICS["float32"]
) -> list[Tensor]:
    """Return how far float noise may move the values that each call of a stage gets."""
    steady = with_held_codes(like, arguments)
    assert isinstance(steady, StagedFunction)
    evaluate(steady, arguments)
    inputs = steady.last.inputs
    squares = [torch.zeros_like(x) for x in inputs]
    generator = torch.Generator().manual_seed(0)
    for _ in range(RUNS):
        evaluate(steady, [moved(argument, unit, generator) for argument in arguments])
        for square, x, near in zip(squares, inputs, steady.last.inputs, strict=False):
            if near.shape == x.shape:
                square += (near - x).nan_to_num_(0.0, 0.0, 0.0).square_()
    margin = MARGIN * max(1.0, math.sqrt(longest_dimension(arguments)) / 2)
    widths = []
    for square, x in zip(squares, inputs, strict=True):
        finite = x.nan_to_num(0.0, 0.0, 0.0)
        typical = finite.square().mean(-1, keepdim=True).sqrt_() if x.dim() else finite.abs()
        room = (finite.abs() + typical) * (unit * FUNCTION_ROUNDINGS)
        widths.append(margin * smoothed(square / RUNS).sqrt_() + room)
    return widths


def noise_of(x: Tensor, width: Tensor) -> Tensor:
    """Return the noise of values before a cast.

    A number that float32 holds is a rounded one, or none that noise makes: only its ratio to a
    scale has noise.
    """
    return torch.where(x.float() == x, CODE_ROOM * x.abs(), width)


def other_codes(
    cast: StageCast, x: Tensor, values: Tensor, width: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the codes that values below and above have: the way, where they differ, and these."""
    scales = cast.scales(x)
    ratios = (x if scales is None else x / scales).abs().nan_to_num(0.0, 0.0, 0.0)
    # Scales are made of the largest values: where these stay, no scale moves with all others.
    anchored = ratios >= ANCHORED * ratios.max() if x.numel() else ratios > 0
    near = torch.where(anchored, 0.0, noise_of(x, width))
    for way in (-1, 1):
        other = cast(x + way * near)
        yield way, (other - values).abs() > 4 * near + SCALE_ROOM * values.abs(), other


def longest_dimension(arguments: Sequence[Any]) -> int:
    """Return a bound on the number of terms that a result adds up."""
    shapes = (argument.shape for argument in arguments if isinstance(argument, Tensor))
    return max((size for shape in shapes for size in shape), default=1)


def _code_noise(
    like: Function,
    arguments: Sequence[Any],
    values: Tensor,
    position: int,
    codes: Sequence[Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Return the effect of other codes, chosen at random: several in one row may cancel."""
    ideal = arguments[position]
    steps = torch.stack([code - ideal for code in codes]).abs().nan_to_num(0.0, 0.0, 0.0).amax(0)
    squares = torch.zeros_like(values)
    if not bool(steps.any()):
        return squares
    for _ in range(CODE_RUNS):
        signs = torch.randint(0, 2, ideal.shape, generator=generator).to(ideal.device) * 2 - 1
        changed = list(arguments)
        changed[position] = ideal + signs * steps
        squares += (evaluate(like, changed) - values).nan_to_num_(0.0, 0.0, 0.0).square_()
    return divided(squares, CODE_RUNS).sqrt_()


def _stage_noise(
    like: StagedFunction,
    arguments: Sequence[Any],
    values: Tensor,
    unit: float,
    generator: torch.Generator,
) -> Tensor:
    """Return the effect of other codes inside, chosen at random."""
    recording = like.keeping()
    evaluate(recording, arguments)
    run, steps = recording.last, []
    for name, x, result, width in zip(
        run.names, run.inputs, run.results, noise_before_casts(like, arguments, unit), strict=True
    ):
        cast = (like.casts or {})[name]
        listed = [
            torch.where(differs, (other - result).abs(), 0.0)
            for _, differs, other in other_codes(cast, x, result, width)
        ]
        steps.append(torch.stack(listed).nan_to_num(0.0, 0.0, 0.0).amax(0))
    squares = torch.zeros_like(values)
    if not any(bool(step.any()) for step in steps):
        return squares
    for _ in range(CODE_RUNS):
        offsets = []
        for step, x, result in zip(steps, run.inputs, run.results, strict=True):
            signs = torch.randint(0, 2, step.shape, generator=generator).to(step.device) * 2 - 1
            offsets.append(result - x + signs * step)
        changed = StagedFunction(like.function, offsets=offsets)
        squares += (evaluate(changed, arguments) - values).nan_to_num_(0.0, 0.0, 0.0).square_()
    return divided(squares, CODE_RUNS).sqrt_()


def moved(value: Any, unit: float, generator: torch.Generator) -> Any:
    """Move each number by one rounding error, up or down at random."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    ups = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8).to(value.device)
    up, down = (float(torch.tensor(1 + step, dtype=torch.float32)) for step in (unit, -unit))
    return ups.double().mul_(up - down).add_(down).mul_(value)


def mover(step: float) -> Callable[[Tensor], Tensor]:
    """Return what moves each number by a relative step at random, the same at each call of this."""
    generator = torch.Generator().manual_seed(0)

    def near(tensor: Tensor) -> Tensor:
        result: Tensor = moved(tensor, step, generator).to(tensor.dtype)
        return result

    return near


def smoothed(squares: Tensor) -> Tensor:
    """Return mean squares that no single lucky draw makes small.

    A few runs measure an element's noise poorly; its row and its column know better. What rows and
    columns explain together is added to what was measured at the element itself.
    """
    if not squares.numel():
        return squares
    rows = squares.reshape(-1, squares.shape[-1]) if squares.dim() else squares.reshape(1, 1)
    by_row, by_column = rows.mean(1, keepdim=True), rows.mean(0, keepdim=True)
    mean = rows.mean()
    explained = by_row * by_column / mean if float(mean) > 0 else torch.zeros_like(rows)
    return (rows + explained).reshape(squares.shape)


def entries_before(poisoned: Tensor) -> Tensor:
    """Return the entries before the poisoned ones, where those reach to the end of a dimension."""
    before = torch.zeros_like(poisoned)
    for dim in range(poisoned.dim()):
        along = poisoned.movedim(dim, 0).reshape(poisoned.shape[dim], -1).any(1)
        first = int(along.int().argmax())
        if 0 < first < len(along) - 1 and bool(along[first:].all()):
            shape = [-1 if other == dim else 1 for other in range(poisoned.dim())]
            before |= poisoned.any(dim, keepdim=True) & ~along.reshape(shape)
    return before


def has_a_factor(change: Tensor, values: Tensor) -> bool:
    """Tell if a change follows the values that it changes.

    The last bits of sums in another order fall to either side. A counter or a state that scales
    what a call gives does not: its changes have the signs of the values, or all the other ones.
    """
    products = (change.double() * values.double()).nan_to_num(0.0, 0.0, 0.0)
    return bool(products.sum().abs() > _FACTOR_SIGMAS * products.square().sum().sqrt())
