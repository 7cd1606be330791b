"""Quantized tensors of a run, held bit for bit against what the definition makes of their sources.

Sources and results are taken at the sites of the model, so that whatever runs between them is what
is looked at. The definition is that of `qgate.formats.definition`, which no quantizer runs. It is
slow, so each tensor gets it at other places; weights are also held whole, against the quantizer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qgate.expected.sampled import (
    GroupSample,
    cast_once,
    define_groups,
    differing,
    sample_groups,
    undefined,
)
from qgate.formats import Quantizer
from qgate.formats.quantizer import quantize_tensor
from qgate.gate.measured import UNNAMED_FAULT, Conformance
from qgate.hooks.tapping import tap_sites
from qgate.loading import LateModule
from qgate.models import Model, Site
from qgate.models.rows import is_text
from qgate.modes import Quantized

if TYPE_CHECKING:
    from qgate.kernel_checks import casts as casts
    from qgate.kernel_checks import record as kernel_checks_record
else:
    casts = LateModule("qgate.kernel_checks.casts")
    kernel_checks_record = LateModule("qgate.kernel_checks.record")


METRIC = "differing_share"
_DIAGNOSED = 4
"""Sites whose fault is looked for: the others of a run mostly have the same one."""
_LARGE = 2**16
_TOKENS = 256


@dataclass(frozen=True)
class WrongValue:
    """A fault of a tensor in words, and its first wrong value."""

    words: str
    first: str


@dataclass
class HeldSite:
    """Tensors of one site so far: shapes with and without differences, and the first difference.

    reason   why nothing can be held here
    """

    reason: str = ""
    values: int = 0
    differing: int = 0
    right: Counter[tuple[int, ...]] = field(default_factory=Counter)
    wrong: Counter[tuple[int, ...]] = field(default_factory=Counter)
    difference: WrongValue | None = None

    @property
    def tensors(self) -> int:
        """Count the tensors that were held."""
        return self.right.total() + self.wrong.total()

    def conformance(self) -> Conformance:
        """Return the figures of the site, with what was looked at or what is wrong in words."""
        if self.reason:
            return Conformance(METRIC, 1, 0, f"not held: {self.reason}")
        if not self.values:
            return Conformance(METRIC, 0, 0, "no tensor passed: nothing is quantized here")
        shapes = len(self.right | self.wrong)
        if self.difference is None:
            about = f"{self.values:,} values of {self.right.total()} tensors in {shapes} shapes"
            return Conformance(METRIC, self.values, 0, about)
        words = [self.difference.words, only_where(self.wrong, self.right), self.difference.first]
        about = "; ".join(filter(None, words))
        return Conformance(METRIC, self.values, self.differing, about)


def only_where(wrong: Counter[tuple[int, ...]], right: Counter[tuple[int, ...]]) -> str:
    """Say which shapes alone are wrong, if something tells them from those that are right."""
    if not right or set(wrong) & set(right):
        return "" if not right else f"in {wrong.total()} of {(wrong + right).total()} tensors"
    tests: dict[str, Callable[[tuple[int, ...]], bool]] = {
        "of one token": lambda shape: math.prod(shape[:-1]) == 1,
        "of several samples": lambda shape: len(shape) > 2 and shape[0] > 1,
        "of one sample": lambda shape: len(shape) > 2 and shape[0] == 1,
        "of an odd length": lambda shape: len(shape) > 1 and shape[-2] % 2 == 1,
        f"above {max(map(math.prod, right)):,} elements": lambda shape: (
            math.prod(shape) > max(map(math.prod, right))
        ),
    }
    for words, test in tests.items():
        if all(map(test, wrong)) and not any(map(test, right)):
            return f"only in tensors {words}"
    listed = ", ".join("x".join(map(str, shape)) for shape in wrong)
    return f"only in tensors of shape {listed}"


@dataclass(frozen=True)
class HeldRows:
    """Rows of a quantized tensor, what they have to be, their sources, and where they lie."""

    actual: Tensor
    expected: Tensor
    source: Tensor
    index: Callable[[int, int], tuple[int, ...]]


class HeldSites:
    """Sites of a mode with what was held of each."""

    def __init__(self) -> None:
        self.sites: dict[str, HeldSite] = {}
        self._diagnosed = 0

    def compare(
        self,
        site: str,
        shape: torch.Size,
        parts: Sequence[HeldRows],
        cause: Callable[[tuple[int, ...]], str],
    ) -> None:
        """Compare rows bit for bit; `cause` names the fault, given the index of a wrong value."""
        record, values, differ = self.sites[site], 0, 0
        for part in parts:
            wrong = differing(part.actual, part.expected)
            values, count = values + wrong.numel(), int(wrong.sum())
            differ += count
            if count and record.difference is None:
                row, column = (int(index) for index in wrong.nonzero()[0])
                index = part.index(row, column)
                record.difference = WrongValue(
                    self._words(index, cause), _first(part, row, column, index, shape)
                )
        record.values += values
        record.differing += differ
        (record.wrong if differ else record.right)[tuple(shape)] += 1

    def refuse(self, site: str, shape: torch.Size, words: str) -> None:
        """Fail a tensor that cannot be compared."""
        record = self.sites[site]
        record.values, record.differing = record.values + 1, record.differing + 1
        record.wrong[tuple(shape)] += 1
        record.difference = record.difference or WrongValue(words, "")

    def _words(self, index: tuple[int, ...], cause: Callable[[tuple[int, ...]], str]) -> str:
        self._diagnosed += 1
        return cause(index) if self._diagnosed <= _DIAGNOSED else UNNAMED_FAULT


class QuantizerRun(HeldSites):
    """Tensors that the quantizers of a plan make, held while the model runs."""

    def __init__(
        self, quantized: Quantized, base: Model, quantizers: Mapping[str, Quantizer]
    ) -> None:
        super().__init__()
        self.quantized, self.base = quantized, base
        self._quantizers = quantizers
        self._sources: dict[str, Tensor] = {}
        self._weights: dict[str, tuple[Tensor, int | None]] = {}
        self._shared: tuple[Tensor, str, list[tuple[GroupSample, Tensor]]] | None = None
        weights = {site.name for site in base.sites() if site.port == "weight"}
        for name, quantizer in quantizers.items():
            is_whole = name in weights and quantizer.rounding != "stochastic"
            self.sites[name] = HeldSite("" if is_whole else undefined(quantizer))

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Hold every quantized tensor of the passes inside."""
        listed = [site for site in self.base.sites() if site.name in self._quantizers]
        flowing = [site for site in listed if site.port != "weight"]
        module = self.quantized.model.module
        with (
            tap_sites(module, flowing, self._take_source, first=True),
            tap_sites(module, listed, self._take_result),
        ):
            yield

    def _take_source(self, site: Site, tensor: Tensor) -> None:
        self._sources[site.name] = tensor.detach()

    def _take_result(self, site: Site, result: Tensor) -> None:
        if site.port != "weight":
            self.hold(site.name, self._sources.pop(site.name), result.detach())
            return
        weight, before = self._weights.get(site.name, (None, None))
        # A write in inference mode cannot be detected: such a weight is held in every pass.
        version = None if result.is_inference() else result._version
        if weight is not result or version is None or version != before:
            self._weights[site.name] = result, version
            source = getattr(self.base.module.get_submodule(site.module), site.port)
            self.hold(site.name, source.detach(), result.detach(), whole=True)

    def hold(self, site: str, source: Tensor, result: Tensor, *, whole: bool = False) -> None:
        """Compare a quantized tensor with what the definition makes of its source.

        `whole` compares all of it with what its quantizer makes of the source, too.
        """
        quantizer = self._quantizers[site]
        if self.sites[site].reason or not source.numel():
            return
        dtype = quantizer.dtype or source.dtype
        if result.shape != source.shape or result.dtype != dtype:
            words = f"is {_kind(result)}, right is {_kind(source, dtype)}"
            self.refuse(site, source.shape, words)
            return
        parts = [
            HeldRows(
                sample.of(result).cpu(),
                expected,
                sample.rows,
                functools.partial(sample.place, source.shape),
            )
            for sample, expected in self._expected(site, source, quantizer, dtype)
        ]
        if whole and not any(bool(differing(x.actual, x.expected).any()) for x in parts):
            parts = [whole_rows(result, quantize_tensor(source, quantizer), source)]
        self.compare(
            site,
            source.shape,
            parts,
            lambda index: cause_of(around(result, index), around(source, index), quantizer),
        )

    def _expected(
        self, site: str, source: Tensor, quantizer: Quantizer, dtype: torch.dtype
    ) -> list[tuple[GroupSample, Tensor]]:
        if undefined(quantizer):
            return []
        # Query, key and value read one tensor.
        key = f"{quantizer!r} {dtype}"
        if self._shared is None or self._shared[0] is not source or self._shared[1] != key:
            samples = [
                (sample, cast_once(define_groups(sample, quantizer, source), dtype))
                for sample in sample_groups(source, quantizer, seed=self.sites[site].tensors)
            ]
            self._shared = (source, key, samples)
        return self._shared[2]


def whole_rows(actual: Tensor, expected: Tensor, source: Tensor) -> HeldRows:
    """Return all of a tensor, what it has to be, and its source, as rows on the CPU."""
    shape = source.shape
    width = shape[-1] if shape else 1

    def place(row: int, column: int) -> tuple[int, ...]:
        index = np.unravel_index(row * width + column, shape)
        return tuple(int(number) for number in index)

    def rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, width).cpu()

    return HeldRows(rows(actual), rows(expected), rows(source), place)


def cause_of(result: Tensor, source: Tensor, quantizer: Quantizer) -> str:
    """Name the fault that explains a quantized tensor."""
    try:
        report = casts.check_cast(result.contiguous(), source.contiguous(), quantizer, options={})
    except kernel_checks_record.CheckFailure as failure:
        return failure.cause.removeprefix(f"the {quantizer.format.name} tensor ")
    except ValueError:
        return UNNAMED_FAULT
    return f"follows another convention: {report.conventions['values']}"


def around(tensor: Tensor, first: Sequence[int], size: int = 0) -> Tensor:
    """Return the sample of a large tensor that holds an element, and tokens beside it.

    `size` is that of another tensor, of which the same tokens are needed.
    """
    if max(tensor.numel(), size) <= _LARGE or tensor.dim() < 2:
        return tensor
    while tensor.dim() > 2:
        tensor, first = tensor[first[0]], first[1:]
    start = first[0] // _TOKENS * _TOKENS
    return tensor[start : start + _TOKENS]


def _first(part: HeldRows, row: int, column: int, index: tuple[int, ...], shape: torch.Size) -> str:
    actual, expected = (float(tensor[row, column]) for tensor in (part.actual, part.expected))
    is_known = part.source.shape == part.actual.shape
    of = f" for {float(part.source[row, column]):.9g}" if is_known else ""
    return (
        f"first at [{', '.join(map(str, index))}] of {'x'.join(map(str, shape))}: {actual:.9g} "
        f"where {expected:.9g} is right{of}"
    )


def _kind(tensor: Tensor, dtype: Any = None) -> str:
    return f"{'x'.join(map(str, tensor.shape))} {str(dtype or tensor.dtype).removeprefix('torch.')}"


def other_lengths(model: Model) -> list[Tensor]:
    """Return samples as they are seldom run: three at an odd length, a few tokens, and one."""
    first = [sample for sample in model.inputs[:3] if isinstance(sample, Tensor)]
    if not first or any(sample.shape[1:] != first[0].shape[1:] for sample in first):
        return []
    together = torch.cat((first * 3)[:3])
    if not is_text(together):
        return [together]
    return [together[:, :65], together[:1, :32], together[1:2, :1]]
