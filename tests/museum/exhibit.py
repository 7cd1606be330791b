"""An exhibit of the museum: a published defect, told by a right and a faulty implementation.

Every file of `tests/museum/exhibits` is one, of at most 60 lines. Its docstring tells the defect;
its `EXHIBIT` has what is needed to see it again.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from qgate.formats import Encoded
from qgate.testing import CheckReport, check_kernel
from tests.museum import exhibits

Function = Callable[..., Any]

KINDS = {
    "scales": "Scales",
    "layouts": "Layouts and swizzles",
    "packing": "Packing",
    "checkpoints": "Checkpoints",
    "experts": "Experts",
    "caches": "Caches and state",
    "positions": "Masks and positions",
    "invariance": "Invariance",
    "rollout": "Training against rollout",
    "accumulation": "Accumulation",
    "calibration": "Calibration",
}
"""Kinds of defects, in the order of the page, with their headings."""


@dataclass(frozen=True)
class Tolerance:
    """What the project's own test allows, and what it compares with.

    against  "unquantized": the reference in float32; "right": the right implementation's result
    """

    rtol: float
    atol: float
    against: str = "unquantized"


@dataclass(frozen=True)
class Exhibit:
    """One published defect.

    source     "owner/repository#number" of the thread that reports it
    kind       one of KINDS
    defect     what was wrong: one sentence in the past tense, for the page's table
    published  what the thread says about its effect, in a few words
    cause      a regular expression that the first line of qgate's failure must match
    arguments  a seeded generator → arguments of the kernel
    right      the implementation after the fix
    faulty     the implementation as it was reported
    like       the reference of unquantized tensors
    inputs, output, options   how `check_kernel` is told of the formats
    tolerance  of the project's own test, None where it has none or says none
    terms      length of the kernel's sums (0 for a cast), None where llama.cpp has no such rule
    """

    source: str
    kind: str
    defect: str
    published: str
    cause: str
    arguments: Callable[[Generator], tuple[Any, ...]]
    right: Function
    faulty: Function
    like: Function
    inputs: dict[int, Any] = field(default_factory=dict)
    output: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    terms: int | None = None
    name: str = ""

    @property
    def url(self) -> str:
        repository, _, number = self.source.partition("#")
        return f"https://github.com/{repository}/issues/{number}"

    def draw(self, seed: int) -> tuple[Any, ...]:
        """Draw the arguments of one seed."""
        return self.arguments(torch.Generator().manual_seed(seed))

    def check(self, kernel: Function, seed: int = 0) -> CheckReport:
        """Check an implementation as a user of qgate would."""
        return check_kernel(
            kernel,
            *self.draw(seed),
            like=self.like,
            inputs=self.inputs,
            output=self.output,
            **self.options,
        )

    @property
    def formats(self) -> list[str]:
        """List the names of the formats that the inputs have."""
        formats = [getattr(declared, "format", declared) for declared in self.inputs.values()]
        return [str(getattr(fmt, "name", fmt)) for fmt in formats]

    def sizes(self, arguments: tuple[Any, ...]) -> tuple[float, float]:
        """Return the RMS of the first and of the last tensor among the arguments."""
        values = [x for x in map(_decoded, arguments) if isinstance(x, Tensor)]
        sizes = [float(x.double().square().mean().sqrt()) for x in values if x.is_floating_point()]
        return sizes[0], sizes[-1]

    def reference(self, arguments: tuple[Any, ...]) -> Tensor:
        """Return what the reference makes of unquantized arguments, in float32."""
        reference: Tensor = self.like(*map(_decoded, arguments))
        return reference.float()

    def result(self, kernel: Function, arguments: tuple[Any, ...]) -> Tensor:
        """Return what an implementation makes of arguments, in float32."""
        packed: list[Any] = []
        for position, argument in enumerate(arguments):
            pack = self.options.get("pack", {}).get(position)
            packed_argument = argument if pack is None else pack(argument)
            packed += packed_argument if isinstance(packed_argument, tuple) else [packed_argument]
        actual = kernel(*packed)
        unpack = self.options.get("unpack")
        return (actual if unpack is None else unpack(actual)).float()


def _decoded(argument: Any) -> Any:
    return argument.decode() if isinstance(argument, Encoded) else argument


def load_exhibits() -> list[Exhibit]:
    """Import every exhibit, in the order of kinds and names."""
    loaded = []
    for module in pkgutil.iter_modules(exhibits.__path__):
        exhibit = importlib.import_module(f"{exhibits.__name__}.{module.name}").EXHIBIT
        loaded.append(replace(exhibit, name=module.name))
    kinds = list(KINDS)
    return sorted(loaded, key=lambda exhibit: (kinds.index(exhibit.kind), exhibit.name))
