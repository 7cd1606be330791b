"""What the collection is made of: right kernels of published packages, each with its faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qgate.testing import CheckReport, check_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One fault of a kernel: what was planted, and words of a good first line.

    kernel    the kernel with the fault
    words     regular expression of the first line, empty where no diagnosis is clear
    """

    name: str
    kernel: Function
    words: str = ""


@dataclass(frozen=True)
class RealKernel:
    """A kernel of a package, and how a user of that package would check it.

    faults   kernels with one planted fault each
    bug      what the package's own code does wrong, where it does; such a kernel must be red
    words    regular expression of the first line of such a failure
    """

    name: str
    package: str
    kernel: Function
    arguments: tuple[Any, ...]
    like: Function
    inputs: dict[int, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    bug: str = ""
    words: str = ""

    def check(self, fault: Fault | None = None) -> CheckReport:
        """Check the kernel, or one with a fault in its place."""
        function = self.kernel if fault is None else fault.kernel

        def kernel(*arguments: Any) -> Any:  # so that no first line holds the name of a fault
            return function(*arguments)

        return check_kernel(
            kernel, *self.arguments, like=self.like, inputs=self.inputs, **self.options
        )


def title_of(kernel: RealKernel, fault: Fault | None) -> str:
    title = f"{kernel.package}: {kernel.name}"
    return title if fault is None else f"{title}: {fault.name}"


def normal(
    seed: int,
    *shapes: tuple[int, ...],
    dtype: torch.dtype = BF16,
    scales: tuple[float, ...] = (),
) -> list[Tensor]:
    """Draw one tensor of normal values for each shape, times its scale."""
    generator = torch.Generator().manual_seed(seed)
    scales = scales or (1.0,) * len(shapes)
    return [
        (torch.randn(shape, generator=generator) * scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


# Faults that fit every kernel --------------------------------------------------------------------


def about(factor: float) -> str:
    """Return an expression of a factor as a line may write it, 30 % of its excess to either side.

    Of 1.002 that is 1.0014 to 1.0026, or 0.14 % to 0.26 %.
    """
    excess = factor - 1
    words = set()
    for share in range(70, 131):
        part = excess * share / 100
        words.add(rf"\b{1 + part:.4f}\d* times".replace(".", r"\."))
        words.add(rf"\b{1 + part:.4f}".rstrip("0").replace(".", r"\.") + " times")
        words |= {rf"\b{100 * abs(part):.{digits}g}\d* %".replace(".", r"\.") for digits in (2, 3)}
    words.add(rf"\b{100 * abs(excess):.1g} %".replace(".", r"\."))
    return "|".join(sorted(words))


def times(kernel: Function, factor: float, words: str = "") -> Fault:
    """Multiply the result, which stays in its dtype, by a factor."""

    def multiplied(*arguments: Any) -> Tensor:
        y = kernel(*arguments)
        return (y.float() * factor).to(y.dtype)

    return Fault(f"result {100 * (factor - 1):+.3g} %", multiplied, words or about(factor))


def changed(name: str, kernel: Function, words: str, change: Callable[[Tensor], Any]) -> Fault:
    """Change the result in place, or replace it."""

    def faulty(*arguments: Any) -> Tensor:
        y = kernel(*arguments).clone()
        replaced = change(y)
        whole = isinstance(replaced, Tensor) and replaced.shape == y.shape
        return replaced if whole else y

    return Fault(name, faulty, words)


def with_argument(
    name: str, kernel: Function, position: int, words: str, change: Callable[[Tensor], Tensor]
) -> Fault:
    """Hand over one argument changed."""

    def faulty(*arguments: Any) -> Any:
        changed_arguments = list(arguments)
        changed_arguments[position] = change(changed_arguments[position].clone())
        return kernel(*changed_arguments)

    return Fault(name, faulty, words)


def term_lost(kernel: Function, position: int, term: int) -> Fault:
    """Leave out one term of a sum over the last dimension of an argument."""

    def without(x: Tensor) -> Tensor:
        x[..., term : term + 1] = 0
        return x

    return with_argument(
        f"term {term} lost",
        kernel,
        position,
        rf"\b{term}\b",
        without,
    )
