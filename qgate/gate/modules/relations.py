"""Modules of a mode on inputs derived from one, where they must agree with themselves.

What a module gives for a sample alone, a prefix, an odd length, another order or a strided view is
part of what it gave for three samples together, and three calls on one input agree: other bits
within float noise, as atomic sums have them, are a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from qgate.expected.derived import CutAxis, DerivedInput, derive
from qgate.expected.noise import (
    ARITHMETICS,
    FUNCTION_ROUNDINGS,
    MARGIN,
    REPETITIONS,
    Expected,
    has_a_factor,
)
from qgate.formats import Quantizer
from qgate.gate.measured import OTHER_VALUES, Conformance
from qgate.hooks import ModuleHooks
from qgate.loading import LateModule
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS, REFUSALS

if TYPE_CHECKING:
    from qgate.causes import outputs as outputs
    from qgate.expected import shared_scales as shared_scales
    from qgate.gate.modules import shapes as shapes
    from qgate.gate.modules.shapes import CallShape
else:
    outputs = LateModule("qgate.causes.outputs")
    shared_scales = LateModule("qgate.expected.shared_scales")
    shapes = LateModule("qgate.gate.modules.shapes")


METRIC = "disagreeing_share"
OF_SAMPLES = ("one", "prefix", "batch", "permuted")
OF_TOKENS = ("one", "odd", "prefix")
OF_MEMORY = ("strided", "transposed")
_WORDS = {
    "one": "alone", "prefix": "as a prefix", "batch": "in a larger batch", "odd": "at odd lengths",
    "permuted": "in another order", "strided": "in strided memory",
    "transposed": "in transposed memory",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class RelatedModule:
    """A module that must agree with itself, and what it promises.

    quantizers  those of its inputs: which elements share a scale
    is_exact    its results are integers times scales, so that no noise is allowed
    tokens      how tokens depend on each other: "alone", "causal" or "unknown"
    unit        the unit roundoff of its arithmetic
    shapes      the numbers of tokens and samples it is also called with: "none", "few" or "all"
    """

    site: str
    module: nn.Module
    quantizers: Sequence[Quantizer] = ()
    is_exact: bool = False
    tokens: str = "alone"
    unit: float = ARITHMETICS["float32"]
    left_out: str = ""
    shapes: Literal["none", "few", "all"] = "none"


@dataclass
class RelatedCall:
    """One call of a module: its arguments, by position or name, and its result."""

    arguments: dict[int | str, Any]
    result: Tensor
    met: set[tuple[tuple[int, ...], bool]] = field(default_factory=set)
    """Shapes of its first input that the module took, and whether memory was strided."""

    def repeat(self, module: nn.Module, values: Sequence[Any]) -> Tensor:
        """Call the module with other values of the same arguments."""
        named = dict(zip(self.arguments, values, strict=True))
        args = [value for key, value in named.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in named.items() if isinstance(key, str)}
        result = first_tensor(module(*args, **kwargs))
        if (first := next((x for x in values if isinstance(x, Tensor)), None)) is not None:
            self.met.add((tuple(first.shape), not first.is_contiguous()))
        return result


def first_tensor(result: Any) -> Tensor:
    """Return what a module returns, or the first of several tensors."""
    tensor: Tensor = result if isinstance(result, Tensor) else result[0]
    return tensor.detach()


def calls_of(model: Model, modules: Iterable[RelatedModule], sample: Any) -> dict[str, RelatedCall]:
    """Run a sample and return the first call of each module."""
    calls: dict[str, RelatedCall] = {}
    pending: dict[str, dict[int | str, Any]] = {}
    with ModuleHooks() as hooks, torch.no_grad():
        for related in modules:

            def before(
                _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, object],
                site: str = related.site,
            ) -> None:  # fmt: skip
                pending[site] = {}
                pending[site].update(enumerate(args))
                pending[site].update(kwargs)

            def after(
                _module: nn.Module, _args: Any, result: Any, site: str = related.site
            ) -> None:
                if site not in calls:
                    calls[site] = RelatedCall(pending[site], first_tensor(result).clone())

            # Arguments before any quantizer of theirs, the result after all: a call has both.
            hooks.add(related.module, before, None, first=True)
            hooks.add(related.module, None, after)
        model.outputs(sample)
    return calls


def relate(related: RelatedModule, call: RelatedCall, samples: int) -> Conformance:
    """Hold a module at itself on derived inputs and in repeated calls."""
    left_out = {related.left_out: ""} if related.left_out else {}
    values, count = 0, 0
    arguments = list(call.arguments.values())
    with torch.no_grad():
        noise, unsteady, unit = _noise(related, call), "", _unit(related, call)
        for number in range(2, REPETITIONS + 1):
            repeated = call.repeat(related.module, arguments)
            differ = ~((repeated == call.result) | (repeated.isnan() & call.result.isnan()))
            values += differ.numel()
            if not bool(differ.any()):
                continue
            change = repeated.double() - call.result.double()
            wrong = differ & ~(change.abs() <= noise(call.result))
            if has_a_factor(change, call.result):
                wrong = differ
            if bool(wrong.any()):
                about = (
                    f"{OTHER_VALUES} in call {number} of the same input: {outputs.scattered(wrong)}"
                )
                return Conformance(METRIC, values, int(wrong.sum()), about)
            words = f"; other bits, within float noise, in call {number} of the same input"
            unsteady = unsteady or words
        for variant in _derived(related, call, samples, left_out):
            expected = variant.arguments[-1]
            try:
                actual = call.repeat(related.module, variant.arguments[:-1])
            except REFUSALS as error:
                left_out[f"{variant.name} (refused: {type(error).__name__})"] = ""
                continue
            count += 1
            values += expected.numel()
            relation = f" {_WORDS[variant.relation]} ({variant.name})"
            wrong_count, about = _disagreement(relation, actual, expected, noise, unit)
            if about:
                return Conformance(METRIC, values, wrong_count, about)
        other = None if related.shapes == "none" else _Shapes(related, call, samples)
        if other is not None and other.about:
            return Conformance(METRIC, values + other.values, other.differing, other.about)
    about = f"the same in {REPETITIONS} calls and at {count} derived inputs{unsteady}"
    if other is not None and other.right:
        values += other.values
        about += f", in {len(other.right)} shapes of up to {other.rows:,} rows"
    if left_out:
        about += f"; left out: {', '.join(left_out)}"
    return Conformance(METRIC, values, 0, about)


class _Shapes:
    """A module in shapes that no sample has: where it is right, and what is wrong elsewhere."""

    def __init__(self, related: RelatedModule, call: RelatedCall, samples: int) -> None:
        self.values, self.differing, self.rows, self.about = 0, 0, 0, ""
        self.right: list[CallShape] = []
        arguments = [*call.arguments.values(), call.result]
        by_sample = _axis(arguments, 0, samples, is_causal=False)
        if by_sample is None:
            return
        by_token = _axis(arguments, 1, samples, is_causal=False)
        has_tokens = by_token is not None and related.tokens == "alone"
        batched = [position for position, _ in by_sample.dimensions]
        first, noise = arguments[batched[0]], _noise(related, call)
        least, unit = float(noise(call.result.new_zeros(1))), _unit(related, call)
        wrong: dict[CallShape, str] = {}
        rows = shapes.most_rows(related.module, arguments)
        if not has_tokens:
            rows //= max(1, first.shape[1:-1].numel())
        is_few = related.shapes == "few"
        listed = shapes.few_shapes if is_few else shapes.call_shapes
        for shape in listed(rows, has_tokens=has_tokens):
            if not _promises(related, first, shape):
                shape = shapes.CallShape(len(first), shape.tokens)
            if shape.rows > rows or not _promises(related, first, shape):
                continue
            shaped = by_sample.take(arguments, torch.arange(shape.samples or 1) % by_sample.length)
            if shape.tokens is not None and by_token is not None:
                shaped = by_token.take(shaped, torch.arange(shape.tokens) % by_token.length)
            if shape.samples is None:
                for position in batched:
                    shaped[position] = shaped[position][0]
            try:
                actual = call.repeat(related.module, shaped[:-1])
            except LENGTH_REFUSALS:
                continue
            self.values, self.rows = self.values + shaped[-1].numel(), max(self.rows, shape.rows)
            if _is_near(actual, shaped[-1], least):
                count, about = _scaled("", actual, shaped[-1], unit)
            else:
                count, about = _disagreement("", actual, shaped[-1], noise, unit)
            if about:
                wrong[shape] = about
                self.differing += count
            else:
                self.right.append(shape)
        if wrong:
            where = shapes.range_of(list(wrong), self.right)
            words = next(iter(wrong.values()))
            self.about = words.replace(OTHER_VALUES, f"{OTHER_VALUES} {where}", 1)


def _is_near(actual: Tensor, expected: Tensor, distance: float) -> bool:
    """Tell quickly if no value is further away than what noise may be at zero."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return bool((actual - expected).abs_().max() <= distance)


def _scaled(relation: str, actual: Tensor, expected: Tensor, unit: float) -> tuple[int, str]:
    """Tell if all values changed by one factor, within their noise; empty if they did not."""
    change = (actual - expected).reshape(-1).float()
    values = expected.reshape(-1).float()
    energy = float(values.dot(values))
    factor = float(change.dot(values)) / energy if energy else 0.0
    if not (abs(factor) > unit and has_a_factor(change, values)):
        return 0, ""
    return actual.numel(), f"{OTHER_VALUES}{relation}: all are {1 + factor:.4g} times as large"


def _promises(related: RelatedModule, first: Tensor, shape: CallShape) -> bool:
    """Tell if rows keep their result in a shape: what shares a scale has to stay together."""
    if related.left_out:
        return False
    is_whole = (shape.samples or 0) >= len(first) and (
        shape.tokens is None or shape.tokens >= first.shape[1]
    )
    for q in related.quantizers:
        if any(shared_scales.mixes(q, first.dim(), dim) for dim in (0, 1)):
            scales_of_all = q.granularity == "tensor" or q.format.kind == "block"
            along = q.granularity == "block" and q.axis_of(first.dim()) != first.dim() - 1
            if not (is_whole and scales_of_all) or along or q.tile or q.rotation:
                return False
    return True


def _disagreement(
    relation: str,
    actual: Tensor,
    expected: Tensor,
    noise: Callable[[Tensor], Tensor],
    unit: float,
) -> tuple[int, str]:
    """Count the values that noise does not explain, and say what they are; empty for none."""
    if actual.shape != expected.shape:
        sizes = ["x".join(map(str, tensor.shape)) for tensor in (actual, expected)]
        return max(1, actual.numel()), f"gives {sizes[0]}{relation}, right is {sizes[1]}"
    width, exact = noise(expected), expected.double()
    near = (actual.double() - exact).abs() <= width
    wrong = ~(near | (actual == expected) | (actual.isnan() & expected.isnan()))
    if not bool(wrong.any()):
        return _scaled(relation, actual, expected, unit)
    words = outputs.describe(actual, Expected.around(exact, width), wrong) or outputs.scattered(
        wrong
    )
    first = tuple(int(index) for index in wrong.nonzero()[0])
    return int(wrong.sum()), (
        f"{OTHER_VALUES}{relation}: {words}; first {float(actual[first]):.9g} where it gave "
        f"{float(expected[first]):.9g}"
    )


def _noise(related: RelatedModule, call: RelatedCall) -> Callable[[Tensor], Tensor]:
    """Return the float noise of another shape's order of operations, given expected values."""
    if related.is_exact:
        return torch.zeros_like
    unit = _unit(related, call)
    weight = getattr(related.module, "weight", None)
    inputs = [x for x in call.arguments.values() if isinstance(x, Tensor)]
    terms = 1
    if isinstance(weight, Tensor) and weight.dim() >= 2:
        terms = max(*weight.shape, weight[0].numel())
    elif inputs:
        terms = max(inputs[0].shape[-1:], default=1)
    typical = call.result.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
    growth = MARGIN * max(1.0, math.sqrt(terms) / 2)
    step = _step(call.result)

    def noise(expected: Tensor) -> Tensor:
        size = expected.double().nan_to_num(0.0, 0.0, 0.0).abs()
        return (size + typical) * (unit * (FUNCTION_ROUNDINGS + growth)) + size * step

    return noise


def _unit(related: RelatedModule, call: RelatedCall) -> float:
    """Return the relative rounding of a result.

    For inputs of some layouts torch rounds a product in 16 bits, and adds a bias to that.
    """
    bias = getattr(related.module, "bias", None)
    if related.unit <= ARITHMETICS["float32"] or not isinstance(bias, Tensor):
        return related.unit
    typical = float(call.result.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
    largest = float(bias.detach().abs().max())
    return related.unit * (1.0 + largest / typical if typical else 1.0)


def _step(values: Tensor) -> float:
    """Return the relative step of the narrowest dtype that holds all values."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((values.to(dtype).to(values.dtype) == values).all()):
            return float(torch.finfo(dtype).eps)
    return float(torch.finfo(torch.float32).eps)


def _derived(
    related: RelatedModule, call: RelatedCall, samples: int, left_out: dict[str, str]
) -> Iterator[DerivedInput]:
    """List derived inputs for which the module promises something, its result last."""
    arguments = [*call.arguments.values(), call.result]
    yield from derive(arguments, [], 1, OF_MEMORY, 0)
    for dim, relations, name in ((0, OF_SAMPLES, "samples"), (1, OF_TOKENS, "tokens")):
        axis = _axis(arguments, dim, samples, is_causal=dim == 1 and related.tokens == "causal")
        if axis is None:
            continue
        if dim == 1 and related.tokens == "unknown":
            left_out["tokens (the module may mix them)"] = ""
            continue
        tensor = next(x for x in arguments if isinstance(x, Tensor))
        sharing = [q for q in related.quantizers if shared_scales.mixes(q, tensor.dim(), dim)]
        if sharing or related.left_out:
            if sharing:
                left_out[f"{name} ({sharing[0].format.name} shares a scale among them)"] = ""
            continue
        yield from derive(arguments, [axis], 1, relations, 0)


def _axis(arguments: Sequence[Any], dim: int, samples: int, *, is_causal: bool) -> CutAxis | None:
    """Return the samples or tokens of all arguments and of the result as one axis."""
    result = arguments[-1]
    # What has the size of the samples in front is of the samples; weights are not.
    batched = [
        position
        for position, argument in enumerate(arguments)
        if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[0] == samples
    ]
    if len(arguments) - 1 not in batched or len(batched) < 2 or result.dim() <= dim + 1:
        return None
    length = result.shape[dim]
    along = [
        p for p in batched if arguments[p].dim() > dim + 1 and arguments[p].shape[dim] == length
    ]
    if length < 2 or len(along) != len(batched):
        return None
    return CutAxis(tuple((position, dim) for position in along), length, dim, is_causal)
