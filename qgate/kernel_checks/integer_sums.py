"""Sums of integer codes in 16 bits: those that wrap, and those that saturate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.expected.derived import find_axes
from qgate.expected.noise import Expected
from qgate.expected.products import Product, find_product
from qgate.kernel_checks.runs import Failing

LOW, HIGH = -(2.0**15), 2.0**15 - 1
BITS = (*range(8, 16), *range(17, 25))
"""Bits of other sums than those of int16 that may be too few, or that are cut off."""
STEPS = (1, 2, 4, 8, 16, 32, 64)
"""Terms that are added before the sum saturates."""
HALF_STEPS = (16, 32, 64, 128, 2**30)
"""Terms of a part of a sum that is rounded to float16."""
MOST = 2**24
"""Products of one pass up to which sums are added step by step."""


@dataclass(frozen=True)
class _Sums:
    """Codes of two arguments, and what the sums of their products are multiplied by."""

    product: Product
    codes: tuple[Tensor, Tensor]
    scale: Tensor

    def of(self, first: Tensor, second: Tensor) -> Tensor:
        names = self.product
        return torch.einsum(f"{names.first},{names.second}->{names.result}", first, second)

    def parts(self, step: int) -> Iterator[Tensor]:
        """Yield the sums of so many terms each."""
        first, second = self.codes
        inner = [n.index(self.product.inner) for n in (self.product.first, self.product.second)]
        length = first.shape[inner[0]]
        for start in range(0, length, step):
            count = min(step, length - start)
            yield self.of(
                first.narrow(inner[0], start, count), second.narrow(inner[1], start, count)
            )


def describe_integer_sums(case: Failing) -> str:
    """Say that sums of codes do not fit into 16 bits, and what becomes of them."""
    sums = _sums(case)
    if sums is None:
        return ""
    whole = sums.of(*sums.codes)
    offset = case.expected.values - whole * sums.scale

    def explains(values: Tensor) -> bool:
        return Expected.around(values * sums.scale + offset, case.expected.width).explains(
            case.actual
        )

    if float(whole.abs().max()) > HIGH:
        if explains((whole - LOW).remainder(HIGH - LOW + 1) + LOW):
            return "sums of codes wrap at 16 bits (int16)"
        if explains(whole.clamp(LOW, HIGH)):
            return "sums of codes saturate at 16 bits (int16)"
    if words := _of_bits(whole, explains):
        return words
    for step in HALF_STEPS:
        added = torch.zeros_like(whole)
        for part in sums.parts(step):
            added = (added + part.half().to(whole.dtype)).half().to(whole.dtype)
        if explains(added):
            terms = f", {step} terms at a time" if step < sums.product.axis.length else ""
            return f"sums of codes are added up in float16{terms}"
    for step in STEPS:
        if whole.numel() * sums.product.axis.length // step > MOST:
            continue
        total, largest = torch.zeros_like(whole), 0.0
        for part in sums.parts(step):
            total = total + part.clamp(LOW, HIGH)
            largest = max(largest, float(total.abs().max()))
            total = total.clamp(LOW, HIGH)
        if largest > HIGH and explains(total):
            terms = "each term" if step == 1 else f"{step} terms each"
            return f"sums of codes saturate at 16 bits (int16), after {terms}"
    return ""


def _of_bits(whole: Tensor, explains: Callable[[Tensor], bool]) -> str:
    """Say that sums have too few bits, or that their lowest ones are cut off."""
    for bits in BITS:
        half = 2.0 ** (bits - 1)
        if float(whole.abs().max()) > half:
            if explains(whole.clamp(-half, half - 1)):
                return f"sums of codes saturate at {bits} bits"
            if explains((whole + half).remainder(2 * half) - half):
                return f"sums of codes wrap at {bits} bits"
    for bits in range(1, 17):
        for change in (torch.floor, torch.trunc, torch.round):
            if explains(change(whole / 2.0**bits) * 2.0**bits):
                does = "rounded off" if change is torch.round else "cut off"
                return f"the lowest {bits} bits of sums of codes are {does}"
    return ""


def _sums(case: Failing) -> _Sums | None:
    """Return the codes of a product of two arguments with scales that its sums have in common."""
    if case.subject.output:
        return None
    scales = case.subject.scales(case.arguments, case.choices)
    if len(scales) < 2:
        return None
    axes = find_axes(case.subject.like, case.ideal)
    product = find_product(case.ideal, axes, case.expected.values)
    if product is None or any(position not in scales for position in product.positions):
        return None
    codes, factors = [], []
    for position, names in zip(product.positions, (product.first, product.second), strict=True):
        scale = scales[position]
        ratio = case.ideal[position] / scale
        if scale.shape != ratio.shape or bool((ratio - ratio.round()).abs().gt(1e-6).any()):
            return None
        inner = names.index(product.inner)
        one = scale.narrow(inner, 0, 1)
        if bool((scale != one).any()):
            return None
        codes.append(ratio.round())
        factors.append(one)
    sums = _Sums(product, (codes[0], codes[1]), factors[0])
    return _Sums(product, sums.codes, sums.of(factors[0], factors[1]))
