"""Gradients of own kernels beside those that FP32 code makes of the same tensors.

A product y = x w has two gradients: of the weight from x and the gradient at y, of the input from w
and that gradient. A kernel may take each of these tensors quantized or not. A factor between its
gradient and the nearest of those products is a fault, whatever error was accepted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qgate.expected.repeats import has_a_factor
from qgate.formats import Quantizer
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.compared_sites import backward_sites
from qgate.hooks import ModuleHooks
from qgate.hooks.tapping import tap_sites
from qgate.models import Site
from qgate.modes import Quantized

METRIC = "differing_share"
_LEAST, _MOST = 0.25, 4.0
"""Only a factor between these is named: beyond them a gradient is not that of the product."""
_ALLOWED = 0.004
"""How far from 1 a factor may be: rounding the gradient at the output moves it by less."""
_LEAST_CORRELATION = 0.9


@dataclass
class _Product:
    """Calls of one module: inputs, gradients at outputs and at inputs, in the same order."""

    site: Site
    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    outer: dict[int, Tensor] = field(default_factory=dict)
    inner: dict[int, Tensor] = field(default_factory=dict)


class OwnGradients:
    """Gradients of the products of an own kernel, watched in a pass back."""

    def __init__(self, quantized: Quantized, meant: Quantized) -> None:
        """`meant` is the mode that a kernel stands for; what is no own kernel has no products."""
        self._root = quantized.model.module
        self._quantizers = {} if meant is quantized else meant.plan.quantizers()
        sites = backward_sites(quantized.model, is_forced=True) if quantized.mode.own else []
        self._products = {
            site.module: _Product(site, self._root.get_submodule(site.module))
            for site in sites
            if site.port == "weight"
        }

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Keep what passes the products inside."""
        hooks = ModuleHooks()

        def take(place: Site, tensor: Tensor) -> Tensor | None:
            product = self._products[place.module]
            if place.port == "input":
                product.inputs.append(tensor.detach())
                tensor = tensor.view_as(tensor)
            if tensor.requires_grad:
                gradients = product.inner if place.port == "input" else product.outer
                number = len(product.inputs) - 1
                hooks.keep(
                    tensor.register_hook(lambda g: gradients.__setitem__(number, g.detach()))
                )
            return tensor if place.port == "input" else None

        places = [
            Site(product.site.module, port, product.site.kind)
            for product in self._products.values()
            for port in ("input", "output")
        ]
        try:
            with tap_sites(self._root, places, take, lenient=True):
                yield
        finally:
            hooks.remove()

    def conformance(self, row: Measured, gradients: Sequence[Tensor]) -> tuple[Conformance, ...]:
        """Return what was compared, given a row of gradients of a weight; nothing for others."""
        product = self._products.get(row.site.removesuffix(":weight"))
        if product is None or not product.inputs or len(product.outer) < len(product.inputs):
            return ()
        return (self._of(product, gradients[0]),)

    def _of(self, product: _Product, of_weight: Tensor) -> Conformance:
        input_cast = self._quantizers.get(f"{product.site.module}:input")
        weight_cast = self._quantizers.get(product.site.name)
        calls = range(len(product.inputs))
        x = torch.cat([_rows(product.inputs[call]) for call in calls])
        g = torch.cat([_rows(product.outer[call]) for call in calls])
        weight: Tensor = getattr(product.module, "weight").detach()  # noqa: B009
        if product.site.transposed:
            weight, of_weight = weight.T, of_weight.T
        by_rows, by_columns = _taken(g, input_cast), _taken(g.T.contiguous(), input_cast)[1:]
        outer = [*(taken.T for taken in by_rows), *by_columns]
        products = (turned @ taken for taken in _taken(x, input_cast) for turned in outer)
        factor, words, values = _factor(of_weight, products), "its gradient", of_weight.numel()
        if factor == 1 and len(product.inner) == len(calls):
            inner = torch.cat([_rows(product.inner[call]) for call in calls])
            products = (taken @ w for w in _taken(weight, weight_cast) for taken in by_rows)
            factor, words = _factor(inner, products), "the gradient of the input"
            values += inner.numel()
        about = f"gradients of the weight and the input, of {len(calls)} calls"
        if factor != 1:
            about = (
                f"{words} is {factor:.4g} times what FP32 code makes of the input, the weight and "
                "the gradient at the output"
            )
        return Conformance(METRIC, values, 0 if factor == 1 else values, about)


def _taken(tensor: Tensor, cast: Quantizer | None) -> list[Tensor]:
    """Return a tensor as a kernel may take it: as it is, and quantized."""
    return [tensor] if cast is None else [tensor, cast(tensor)]


def _factor(actual: Tensor, candidates: Iterable[Tensor]) -> float:
    """Return the factor between a gradient and the candidate that is nearest to it but for one."""
    flat = actual.reshape(-1).double()
    norm, best, factor = float(flat.norm()), _LEAST_CORRELATION, 1.0
    for candidate in candidates:
        values = candidate.reshape(-1).double()
        energy = float(values.square().sum())
        if values.shape != flat.shape or not (norm and energy):
            continue
        correlation = float(flat.dot(values)) / (norm * energy**0.5)
        if correlation <= best:
            continue
        best, times = correlation, float(flat.dot(values)) / energy
        is_off = abs(times - 1) > _ALLOWED and has_a_factor(flat - values, values)
        factor = times if is_off and _LEAST < times < _MOST else 1.0
    return factor


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).float()
