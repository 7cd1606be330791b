"""Relations of one kernel: rows, orders, lengths and parts of its arguments, against itself.

Which dimensions are rows, columns and terms of sums is learned from the reference function, and so
is the float noise. At each length of the terms (powers of two and those beside them) every row has
to give the same alone, in any order and in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.expected.derived import CutAxis, are_independent, derive, find_axes
from qgate.expected.noise import REPETITIONS, Expected, evaluate, expect, single_tensor
from qgate.formats import Quantizer
from qgate.relations.causes import other_rows_in
from qgate.relations.record import Disagreement, RelationReport

NAMES = {
    "one": "alone",
    "odd": "prefix",
    "tail": "prefix",
    "prefix": "prefix",
    "batch": "others",
    "permuted": "permuted",
}
"""Relations of a model by the name of the derived input that asks for them."""
OF_KERNELS = ("repeat", "alone", "others", "permuted", "prefix", "split K", "split N")
_SHORTEST = 16
_PARTS = (2, 4)
_REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError, IndexError)

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Length:
    """Arguments with one length of the terms, what the kernel gives for them, and its noise."""

    terms: int
    arguments: list[Any]
    result: Tensor
    width: Tensor


class KernelRelations:
    """Relations of a kernel with tensors in and one tensor out; `like` is the same function."""

    def __init__(
        self,
        kernel: Function,
        arguments: Sequence[Any],
        *,
        like: Function,
        inputs: Mapping[int, Any] | None = None,
        arithmetic: str = "float32",
        bitwise: bool = False,
        seed: int = 0,
    ) -> None:
        self.kernel, self.like, self.arguments = kernel, like, list(arguments)
        self.arithmetic, self.bitwise, self.seed = arithmetic, bitwise, seed
        name = getattr(kernel, "__name__", type(kernel).__name__)
        self.report = RelationReport("the kernel" if name == "<lambda>" else str(name))
        self.quantizers = [_quantizer(value) for value in (inputs or {}).values()]
        self._tried: set[int] = set()
        self.axes = find_axes(like, self.arguments)
        if not any(axis.output is not None for axis in self.axes):
            raise QgateError(
                f"no dimension of the arguments of {self.report.name} could be cut: its relations "
                "cannot be asked. Give arguments with two rows or more, and like= that takes fewer."
            )

    def check(self, chosen: frozenset[str]) -> RelationReport:
        """Compare all relations asked for; the report has what disagrees."""
        inner = next((axis for axis in self.axes if axis.is_inner), None)
        whole = self._at(self.arguments, 0 if inner is None else inner.length)
        if "repeat" in chosen:
            self._repeat(whole)
        wrong: dict[str, list[int]] = {}
        for length in self._lengths(whole, inner):
            for relation in self._of_rows(length, chosen):
                wrong.setdefault(relation, []).append(length.terms)
        self._name_lengths(wrong)
        if inner is not None and "split K" in chosen:
            self._split(whole, inner)
        return self.report

    def run(self, arguments: Sequence[Any]) -> Tensor:
        """Call the kernel on copies: what it changes in place is not seen by the next call."""
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        return single_tensor(self.kernel(*copies), self.report.name).detach().clone()

    def _at(self, arguments: list[Any], terms: int) -> _Length:
        expected = expect(self.like, arguments, arithmetic=self.arithmetic)
        return _Length(terms, arguments, self.run(arguments), expected.width)

    def _repeat(self, whole: _Length) -> None:
        for number in range(2, REPETITIONS + 1):
            repeated = self.run(whole.arguments)
            words = f"in call {number} of the same input"
            self._compare("repeat", words, repeated, whole.result, whole.width, is_exact=True)

    # Lengths of the terms -------------------------------------------------------------------------

    def _lengths(self, whole: _Length, inner: CutAxis | None) -> Iterator[_Length]:
        """Yield the example, then powers of two of the terms, and lengths beside them."""
        yield whole
        step = max(map(_block_of, self.quantizers), default=1)
        for terms in [] if inner is None else _powers(inner.length, step):
            assert inner is not None
            cut = inner.take(self.arguments, torch.arange(terms))
            try:
                yield self._at(cut, terms)
            except _REFUSALS as error:
                self.report.left_out[f"K = {terms}"] = f"refused: {error}"

    def _of_rows(self, length: _Length, chosen: frozenset[str]) -> Iterator[str]:
        """Compare rows and columns of one length; yield relations that do not hold."""
        self._tried.add(length.terms)
        for axis in self.axes:
            if axis.output is None:
                continue
            of_rows = axis.cuts_rows
            for variant in derive(length.arguments, [axis], 1, tuple(NAMES), self.seed):
                relation = NAMES[variant.relation] if of_rows else "split N"
                if relation not in chosen or variant.cut is None:
                    continue
                entries = variant.cut[1]
                if not len(entries):
                    continue
                sides = (length.arguments, variant.arguments)
                exact, part = (evaluate(self.like, arguments) for arguments in sides)
                if not are_independent(exact, part, axis.output, entries):
                    continue
                words = f"for {variant.name}" + (f", K = {length.terms}" if length.terms else "")
                try:
                    actual = self.run(variant.arguments)
                except _REFUSALS as error:
                    self.report.left_out[f"{relation} {words}"] = f"refused: {error}"
                    continue
                rows = entries.to(length.result.device)
                expected = length.result.index_select(axis.output, rows)
                width = length.width.index_select(axis.output, rows)
                cause = functools.partial(self._cause, length, axis) if of_rows else str
                if self._compare(relation, words, actual, expected, width, cause):
                    yield relation

    def _cause(self, length: _Length, axis: CutAxis) -> str:
        """Say if the first row gives other values beside louder ones."""
        output = axis.output
        dims = [dim for position, dim in axis.dimensions if position == 0]
        assert output is not None

        def first_row(factor: float) -> Tensor:
            scaled = length.arguments[0].clone()
            scaled.narrow(dims[0], 1, scaled.shape[dims[0]] - 1).mul_(factor)
            return self.run([scaled, *length.arguments[1:]]).select(output, 0)

        try:
            words = other_rows_in(first_row)
        except _REFUSALS:
            return ""
        return f"it has {words}" if words else ""

    def _name_lengths(self, wrong: Mapping[str, Sequence[int]]) -> None:
        """Say of relations that hold at some lengths of the terms at which they do not."""
        tried = self._tried
        for relation, lengths in wrong.items():
            at = sorted({*lengths})
            if not at or not tried - {*at}:
                continue
            powers = all(terms & (terms - 1) == 0 for terms in at) and len(at) > 1
            words = f"only where K is {', '.join(map(str, at))}"
            words += ", powers of two" if powers else ""
            words += f"; not where it is {', '.join(map(str, sorted(tried - {*at})))}"
            self.report.disagreements = [
                replace(d, cause=words) if d.relation == relation and not d.cause else d
                for d in self.report.disagreements
            ]

    # Parts ----------------------------------------------------------------------------------------

    def _split(self, whole: _Length, axis: CutAxis) -> None:
        """Compare the sum over parts of the terms, as ranks of tensor parallelism add them up."""
        for parts in _PARTS:
            size, words = axis.length // parts, f"as the sum of {parts} parts of K = {axis.length}"
            reason = self._unsplittable(size, axis.length, parts)
            if reason:
                self.report.left_out[f"split K {words}"] = reason
                continue
            cuts = [
                axis.take(self.arguments, torch.arange(start, start + size))
                for start in range(0, axis.length, size)
            ]
            exact = torch.stack([evaluate(self.like, cut) for cut in cuts]).sum(0)
            if not torch.allclose(exact, evaluate(self.like, self.arguments), rtol=1e-9, atol=1e-9):
                self.report.left_out["split K"] = "the reference is no sum over that dimension"
                return
            results = [self.run(cut).double() for cut in cuts]
            # Each part is rounded to the dtype of the result before it is added.
            stacked = torch.stack(results)
            rounding = stacked.abs().sum(0) * (torch.finfo(whole.result.dtype).eps / 2)
            total = stacked.sum(0)
            width = whole.width * 2 + rounding
            self._compare("split K", words, total, whole.result, width, is_exact=False)

    def _unsplittable(self, size: int, length: int, parts: int) -> str:
        if not size or length % parts:
            return f"{length} terms are no {parts} equal parts"
        for quantizer in self.quantizers:
            fmt, block = quantizer.format, _block_of(quantizer)
            is_whole = fmt.needs_amax if fmt.kind == "block" else block == 1
            if quantizer.scale is None and quantizer.granularity is not None and is_whole:
                return (
                    f"{quantizer.format.name} makes a scale of all of K: a rank that quantizes its "
                    "part gets another one"
                )
            if size % block:
                return f"parts of {size} are no whole blocks of {block}"
        return ""

    def _compare(
        self,
        relation: str,
        words: str,
        actual: Tensor,
        expected: Tensor,
        width: Tensor,
        cause: Callable[[], str] = str,
        *,
        is_exact: bool | None = None,
    ) -> bool:
        """Note if values differ by more than noise; return True if they do."""
        self.report.count("result", actual.numel())
        exact = expected.double()
        if actual.shape != expected.shape:
            wrong = torch.ones_like(expected, dtype=torch.bool)
            error = float("inf")
        else:
            is_exact = self.bitwise if is_exact is None else is_exact
            room = torch.zeros_like(width) if is_exact else width
            wrong = Expected.around(exact, room).outside(actual)
            difference = (actual.double() - exact).square().mean().sqrt()
            error = float(difference / exact.square().mean().sqrt().clamp_min(1e-300))
        if not bool(wrong.any()):
            self.report.agree(relation)
            return False
        rms = float(exact.square().mean().sqrt())
        limit = float(width.median()) / rms if rms and not self.bitwise else 0.0
        first = tuple(int(index) for index in wrong.nonzero()[0])
        self.report.disagreements.append(
            Disagreement(
                relation,
                words,
                "result",
                (),
                int(wrong.sum()),
                wrong.numel(),
                f"the values from {first} on",
                error,
                limit,
                cause(),
            )
        )
        return True


def _powers(length: int, step: int) -> list[int]:
    """List powers of two below a length and what is beside them, in whole blocks."""
    powers = [2**k for k in range(4, 16) if _SHORTEST <= 2**k <= length]
    beside = {power + side * step for power in powers for side in (-1, 0, 1)}
    return sorted(terms for terms in beside if step <= terms < length and terms % step == 0)


def _block_of(quantizer: Quantizer) -> int:
    """Return the terms that share a scale along the sum; 1 where that is no block."""
    is_block = quantizer.format.kind == "block" or quantizer.granularity == "block"
    return int(quantizer.block or 1) if is_block else 1


def _quantizer(value: Any) -> Quantizer:
    return value if isinstance(value, Quantizer) else Quantizer(str(value))
