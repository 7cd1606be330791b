"""Gradients of one's own products beside those that FP32 code makes of the same tensors.

A product y = x w has two gradients: of the weight from x and the gradient at y, of the input from w
and that gradient. A kernel of one's own may take each of these tensors quantized or not, so only a
factor between its gradient and the nearest of those products is a fault, whatever error was
accepted. Gradients in the modes of qgate are held by `gradient_code`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qgate.expected.noise import has_a_factor
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
_NOISE = 2.0**-14
"""Share of a gradient's RMS that is float noise: it had 3e-7, and sums in bfloat16 have 2e-3."""
_OF_CODE = "what FP32 code makes of the input, the weight and the gradient at the output"


@dataclass
class _Product:
    """Calls of one module: inputs, gradients at outputs and at inputs, in the same order."""

    site: Site
    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    outer: dict[int, Tensor] = field(default_factory=dict)
    inner: dict[int, Tensor] = field(default_factory=dict)


class ProductGradients:
    """Gradients of the products of a mode, watched in a pass back."""

    def __init__(self, quantized: Quantized, meant: Quantized) -> None:
        """Watch a mode of one's own; `meant` is what it stands for, or the mode itself."""
        self._root = quantized.model.module
        self._quantizers = {} if meant is quantized else meant.plan.quantizers()
        sites = backward_sites(quantized.model, is_forced=True) if quantized.mode.own else []
        # A block gets the reference's input and gradient, after what is kept of them here.
        blocks = {site.module for site in sites if site.is_block}
        self._products = {
            site.module: _Product(site, self._root.get_submodule(site.module))
            for site in sites
            if site.port == "weight" and site.kind != "conv" and site.module not in blocks
        }

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Keep what passes the products inside."""
        hooks = ModuleHooks()
        outputs: list[tuple[dict[int, Tensor], int, Tensor, object]] = []

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
                if place.port == "output":
                    tensor.retain_grad()
                    outputs.append((gradients, number, tensor, tensor.grad_fn))
            return tensor if place.port == "input" else None

        places = [
            Site(product.site.module, port, product.site.kind)
            for product in self._products.values()
            for port in ("input", "output")
        ]
        try:
            with tap_sites(self._root, places, take, lenient=True):
                yield
            for gradients, number, tensor, node in outputs:
                # At the end of a block it is the reference's; code that writes in place loses it.
                if tensor.grad is not None and tensor.grad_fn is node:
                    gradients[number] = tensor.grad
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
        weight: Tensor = getattr(product.module, "weight").detach().float()  # noqa: B009
        if product.site.transposed:
            weight, of_weight = weight.T, of_weight.T
        by_rows = _versions(g, input_cast)
        by_columns = [version.T for version in by_rows]
        by_columns += _versions(g.T.contiguous(), input_cast)[1:]
        candidates = (turned @ v for v in _versions(x, input_cast) for turned in by_columns)
        fault, values = _fault("its gradient", of_weight, candidates), of_weight.numel()
        if not fault and len(product.inner) == len(calls):
            inner = torch.cat([_rows(product.inner[call]) for call in calls])
            candidates = (v @ w for w in _versions(weight, weight_cast) for v in by_rows)
            fault = _fault("the gradient of the input", inner, candidates)
            values += inner.numel()
        about = fault or f"gradients of the weight and the input, of {len(calls)} calls"
        return Conformance(METRIC, values, values if fault else 0, about)


def _fault(words: str, actual: Tensor, candidates: Iterable[Tensor]) -> str:
    """Name the factor that a gradient has."""
    factor = _nearest(actual, candidates)
    return f"{words} is {factor:.4g} times {_OF_CODE}" if factor != 1 else ""


def _versions(tensor: Tensor, cast: Quantizer | None) -> list[Tensor]:
    """Return a tensor as a kernel may take it: as it is, and quantized."""
    return [tensor] if cast is None else [tensor, cast(tensor)]


def _nearest(actual: Tensor, candidates: Iterable[Tensor]) -> float:
    """Return the factor between a gradient and the nearest candidate."""
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
        is_whole = float((flat - times * values).norm()) <= _NOISE * norm
        is_off = abs(times - 1) > _ALLOWED and (is_whole or has_a_factor(flat - values, values))
        factor = times if is_off and _LEAST < times < _MOST else 1.0
    return factor


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).float()
