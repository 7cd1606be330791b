"""Inputs that no sample has, for products of qgate's own modes: held against exact products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qgate.expected.derived import SPECIAL, derive
from qgate.expected.intermediates import HALVES
from qgate.expected.modules import exact_product, own_factors
from qgate.expected.noise import ARITHMETICS, Expected
from qgate.gate.measured import Conformance
from qgate.gate.modules.hard_inputs import hard_rows
from qgate.gate.modules.relations import METRIC, RelatedCall, RelatedModule
from qgate.hooks.tapping import tap_sites
from qgate.loading import LateModule
from qgate.models import Model, Site
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.modes import Quantized

if TYPE_CHECKING:
    from qgate.causes import outputs as outputs
else:
    outputs = LateModule("qgate.causes.outputs")

_ROWS = 16
_LARGE = 2.0**20
"""Factor of large values: beyond the range of every format that has no scale."""


class HardProducts:
    """Holds products at hard inputs: what their quantizers made of these, times the weight."""

    def __init__(self, quantized: Quantized, base: Model) -> None:
        self._network = quantized.model.module
        self._sites: dict[str, dict[str, Site]] = {}
        for site in base.sites():
            if site.is_product and site.kind in ("linear", "conv"):
                self._sites.setdefault(site.module, {})[site.port] = site

    def holds(self, site: str) -> bool:
        """Tell if the output at a site is a product of an input and a weight."""
        return {"input", "output"} <= self._sites.get(_module_of(site), {}).keys()

    def add(self, related: RelatedModule, call: RelatedCall, agreement: Conformance) -> Conformance:
        """Add the first fault at hard inputs to an agreement, or how many of them are right."""
        sites = self._sites[_module_of(related.site)]
        if agreement.differing:
            return agreement
        count = 0
        for words, arguments in _hard_calls([*call.arguments.values()]):
            try:
                x, actual = self._run(related, call, arguments, sites)
            except LENGTH_REFUSALS:
                continue
            product = _product(related.module, x, actual.dtype)
            if product is None:
                return agreement
            bounds = Expected.around(*product)
            wrong = bounds.outside(actual.double())
            wrong &= ~_spread_by_torch(related.module, x, actual)
            if bool(wrong.any()):
                axis = sites["output"].channel_axis(actual)
                about = f"is wrong for inputs {words}: {_describe(actual, bounds, wrong, axis)}"
                return Conformance(METRIC, actual.numel(), int(wrong.sum()), about)
            count += 1
        return replace(agreement, about=f"{agreement.about}, right for {count} hard inputs")

    def _run(
        self,
        related: RelatedModule,
        call: RelatedCall,
        arguments: Sequence[Any],
        sites: dict[str, Site],
    ) -> tuple[Tensor, Tensor]:
        """Return the quantized input of a call, and its result before a quantizer of its own."""
        tensors: dict[str, Tensor] = {}

        def take(site: Site, tensor: Tensor) -> None:
            tensors[site.port] = tensor.detach()

        with (
            tap_sites(self._network, [sites["input"]], take),
            tap_sites(self._network, [sites["output"]], take, first=True),
        ):
            call.repeat(related.module, arguments)
        return tensors["input"], tensors["output"]


def _module_of(site: str) -> str:
    return site.rpartition(":")[0]


def _hard_calls(arguments: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """List hard inputs made of one call, each with a name."""
    (position, x) = next((k, v) for k, v in enumerate(arguments) if isinstance(v, Tensor))
    few = x[:1, :_ROWS] if x.dim() == 3 else x[:_ROWS]
    call_values = list(arguments)

    def call(values: Tensor) -> list[Any]:
        return [values if k == position else value for k, value in enumerate(call_values)]

    rows = few.reshape(-1, few.shape[-1])
    for words, hard in hard_rows(rows, _LARGE, _LARGE):
        yield words, call(hard.reshape(few.shape))
    for variant in derive([few], [], 1, SPECIAL, 0):
        yield f"with {variant.name.removesuffix(' (argument 0)')}", call(variant.arguments[0])


def _spread_by_torch(module: nn.Module, x: Tensor, actual: Tensor) -> Tensor:
    """Find NaN that torch's own convolution in 16 bits makes beside those of its input.

    Its kernels multiply neighbors by zero, where a channel or a tap is missing in their tiles.
    """
    if actual.dtype not in HALVES or not isinstance(module, nn.modules.conv._ConvNd):
        return torch.zeros_like(actual, dtype=torch.bool)
    weight = module.weight
    assert isinstance(weight, Tensor)
    of_torch = exact_product(module, x, weight, dtype=actual.dtype)
    assert of_torch is not None
    return actual.isnan() & of_torch.isnan()


def _product(module: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return the exact product with a quantized input, and the noise of sums and rounding.

    None where the module has a way of its own.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    exact = exact_product(module, x, weight)
    sizes = exact_product(module, x.abs(), weight.abs(), biased=False)
    if exact is None or sizes is None:
        return None
    sizes = sizes.abs()
    terms = weight.numel() // min(weight.shape[:2])
    limits = torch.finfo(dtype)
    sums = (sizes + exact.abs()) * (2 * terms * ARITHMETICS["float32"])
    room = sums + exact.abs() * limits.eps + limits.tiny
    if getattr(module, "transposed", False) or own_factors(module) != (1.0, 1.0):
        room = room + sizes * limits.eps  # torch rounds each tap, and own code its weight
    elif isinstance(getattr(module, "bias", None), Tensor):
        # Of strided inputs torch rounds the product, and adds the bias to that.
        plain = exact_product(module, x, weight, biased=False)
        assert plain is not None
        room = room + plain.abs() * limits.eps
    return exact.to(dtype).double(), room.nan_to_num(0.0, 0.0, 0.0)


def _describe(actual: Tensor, bounds: Expected, wrong: Tensor, axis: int) -> str:
    actual, wrong = actual.movedim(axis, -1), wrong.movedim(axis, -1)
    sides = (side.movedim(axis, -1) for side in (bounds.values, bounds.low, bounds.high))
    bounds = Expected(*sides)
    count = f"{int(wrong.sum()):,} of {wrong.numel():,}"
    words = (
        (f"{count} results are zero" if not bool(actual[wrong].any()) else "")
        or outputs.describe_ruin(actual, bounds, wrong)
        or outputs.describe(actual, bounds, wrong)
        or outputs.scattered(wrong)
    )
    words = words if axis == -1 else words.replace("column", "channel")
    first = tuple(int(index) for index in wrong.nonzero()[0])
    value, right = float(actual[first]), float(bounds.values[first])
    return f"{words}; first {value:.9g} where {right:.9g} is right"
