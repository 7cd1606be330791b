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

from qgate.causes.places import place_words, range_words
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
_LEAST_PART, _LEAST_TERM = 0.03, 0.25
"""Distance from 1 of the factor of a row, and of a term of a sum, from which it is a fault."""
_LEAST_ENERGY = 2.0**-10
"""Energy of a row, of that of the largest, below which a cast of gradients may flush it."""
_MOST_WRONG, _SIGMAS, _NORMAL, _SURE = 0.25, 8.0, 1.4826, 0.99
_TINY, _NEAR = 1e-300, 1e-3
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
        nearest, values = Nearest.of(of_weight, candidates), of_weight.numel()
        fault = _fault("its gradient", nearest, ("row", "column"), ("token", g, x))
        if not fault and len(product.inner) == len(calls):
            inner = torch.cat([_rows(product.inner[call]) for call in calls])
            candidates = (v @ w for w in _versions(weight, weight_cast) for v in by_rows)
            nearest = Nearest.of(inner, candidates)
            terms = ("output channel", g.T, weight)
            fault = _fault("the gradient of the input", nearest, ("token", "channel"), terms)
            values += inner.numel()
        about = fault or f"gradients of the weight and the input, of {len(calls)} calls"
        return Conformance(METRIC, values, values if fault else 0, about)


def _fault(
    words: str,
    nearest: Nearest,
    axes: tuple[str, str],
    terms: tuple[str, Tensor, Tensor],
) -> str:
    """Say what is wrong with a gradient: parts of it, a term of its sum, or all of it.

    axes   what the dimensions of the gradient are
    terms  what a term of its sum belongs to, and the two sides whose rows' products are the terms
    """
    if nearest.right is None:
        return f"{words} {nearest.moved} {_OF_CODE}" if nearest.moved else ""
    if part := nearest.part(axes):
        return f"{words} is, in {part} {_OF_CODE}"
    if part := nearest.term(*terms):
        return f"{words} counts {part}"
    return f"{words} is {nearest.factor:.4g} times {_OF_CODE}" if nearest.factor != 1 else ""


def _versions(tensor: Tensor, cast: Quantizer | None) -> list[Tensor]:
    """Return a tensor as a kernel may take it: as it is, and quantized."""
    return [tensor] if cast is None else [tensor, cast(tensor)]


@dataclass(frozen=True)
class Nearest:
    """A gradient beside the nearest product that it may be.

    right   that product, None where none is near
    factor  the factor between the two, 1 if it is none
    moved   how rows stand elsewhere, where that brings a product near; empty if it does not
    """

    actual: Tensor
    right: Tensor | None
    factor: float
    moved: str = ""

    @classmethod
    def of(cls, actual: Tensor, candidates: Iterable[Tensor]) -> Nearest:
        """Find the nearest candidate of a gradient."""
        listed = [c.double() for c in candidates if c.shape == actual.shape]
        values = actual.double()
        norm = float(values.norm())
        best, right, factor = _LEAST_CORRELATION, None, 1.0
        for candidate in listed:
            energy = float(candidate.square().sum())
            if not (norm and energy):
                continue
            correlation = float((values * candidate).sum()) / (norm * energy**0.5)
            if correlation <= best:
                continue
            best, right = correlation, candidate
            times = float((values * candidate).sum()) / energy
            is_whole = float((values - times * candidate).norm()) <= _NOISE * norm
            is_off = abs(times - 1) > _ALLOWED and (
                is_whole or has_a_factor(values - candidate, candidate)
            )
            factor = times if is_off and _LEAST < times < _MOST else 1.0
        moved = "" if right is not None or not norm else _moved(values, listed)
        return cls(values, right, factor, moved)

    def part(self, axes: tuple[str, str]) -> str:
        """Name a few rows or columns with a factor that the others have not; empty if none have."""
        assert self.right is not None
        for axis, dim in zip(axes, (0, 1), strict=True):
            a, e = (side.movedim(dim, 0) for side in (self.actual, self.right))
            energy = e.square().sum(1)
            sizes = (a * e).sum(1) / energy.clamp_min(_TINY)
            error = (a - sizes[:, None] * e) * e
            noise = error.square().sum(1).sqrt() / energy.clamp_min(_TINY)
            usable = energy > _LEAST_ENERGY * energy.max()
            wrong = _outlying(sizes, noise, usable, _LEAST_PART)
            if 0 < int(wrong.sum()) <= _MOST_WRONG * int(usable.sum()):
                places = wrong.nonzero().flatten().tolist()
                return f"{place_words(places, len(a), axis)}, {_times(sizes[wrong])}"
        return ""

    def term(self, axis: str, first: Tensor, second: Tensor) -> str:
        """Name an entry whose term of a sum of products has another weight; empty if none has."""
        assert self.right is not None
        residual = self.actual - self.right
        if residual.shape != (first.shape[1], second.shape[1]):
            return ""
        rows, columns = first.double(), second.double()
        energy = rows.square().sum(1) * columns.square().sum(1)
        shares = torch.einsum("to,oi,ti->t", rows, residual, columns) / energy.clamp_min(_TINY)
        noise = residual.square().mean().sqrt() / energy.clamp_min(_TINY).sqrt()
        usable = energy > _LEAST_ENERGY * energy.max()
        wrong = _outlying(shares, noise, usable, _LEAST_TERM)
        if not 0 < int(wrong.sum()) <= _MOST_WRONG * int(usable.sum()):
            return ""
        where = place_words(wrong.nonzero().flatten().tolist(), len(first), axis)
        return f"{where} {_times(1 + shares[wrong])}, and others once"


def _times(factors: Tensor) -> str:
    low, high = float(factors.min()), float(factors.max())
    return f"{range_words(low, high) if high - low > _NEAR * abs(high) else f'{low:.4g}'} times"


def _outlying(sizes: Tensor, noise: Tensor, usable: Tensor, least: float) -> Tensor:
    """Mark sizes that are far from the usual one, in units of noise and of how they spread."""
    if not bool(usable.any()):
        return usable
    distance = (sizes - sizes[usable].median()).abs()
    spread = _NORMAL * distance[usable].median()
    return usable & (distance > least) & (distance > _SIGMAS * torch.hypot(noise, spread))


def _moved(actual: Tensor, candidates: Sequence[Tensor]) -> str:
    """Say that rows stand one place later or earlier than in a product."""
    for candidate in candidates:
        for step, words in ((1, "stands one row later than"), (-1, "stands one row before")):
            other = candidate.roll(step, 0)
            sizes = float(other.norm()) * float(actual.norm())
            if sizes and float((actual * other).sum()) > _SURE * sizes:
                return words
    return ""


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).float()
