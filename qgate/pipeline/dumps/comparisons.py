"""Two dumps compared, tensor by tensor: what differs first, and how much.

Tensors with the same hash are equal and not read. Of the others the bytes are compared, and where
they differ their errors are taken in one pass over both. Files are mapped, not copied, and not
proved by their hashes: `qgate dumps verify` does that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qgate import urls
from qgate.dumps import Dump, Record, nbytes
from qgate.engine import Failure, Workers, outcomes
from qgate.errors import QgateError
from qgate.pipeline.dumps.looks import opened, together
from qgate.pipeline.dumps.pairs import Origin, Twin, origins, paired
from qgate.stats import errors, serial
from qgate.stats.plain_errors import plain_errors

Kind = Literal["equal", "differs", "unfit", "summary"]
_EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF << 52),
}
"""The bits of a dtype's infinity, and the integers to read them as."""
_AT_ONCE = 1 << 22
_IN_CACHE = 1 << 16


@dataclass(frozen=True)
class PairErrors:
    """One tensor of two dumps. A number that cannot be had is NaN, which passes no limit.

    kind     unfit: the two cannot be compared; summary: no values were kept to compare
    """

    actual: Record
    reference: Record
    kind: Kind
    relative_mse: float = math.nan
    correlation: float = math.nan
    max_abs: float = math.nan
    nonfinite: int = 0
    why: str = ""
    origin: Origin = ""

    @property
    def badness(self) -> tuple[float, ...]:
        """Sorts the worst last: what has no number is worse than any number."""
        if self.kind in ("equal", "summary") and not self.nonfinite:
            return -1.0, 0.0, 0.0
        size = self.relative_mse
        return (1.0, 0.0, 0.0) if math.isnan(size) else (0.0, size, self.max_abs)

    def is_within(self, relative_mse: float | None) -> bool:
        """Whether it can be compared, and its error is at most that."""
        if self.kind == "unfit":
            return False
        return relative_mse is None or self.relative_mse <= relative_mse

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.actual.title,
            "module": self.actual.module,
            "rank": self.actual.rank,
            "order": self.actual.order,
            "shape": list(self.actual.shape),
            **{name: getattr(self, name) for name in ("kind", "origin", "why", "nonfinite")},
            **{name: getattr(self, name) for name in ("relative_mse", "correlation", "max_abs")},
        }


@dataclass
class DumpComparison:
    """All pairs in the order of execution, what had no counterpart, and what was said of both."""

    pairs: list[PairErrors]
    only_actual: list[Record]
    only_reference: list[Record]
    notes: list[str] = field(default_factory=list)

    def of_kind(self, kind: Kind) -> list[PairErrors]:
        return [each for each in self.pairs if each.kind == kind]

    @property
    def different(self) -> list[PairErrors]:
        """What is not equal, in the order of execution; what cannot be compared is among them."""
        return [each for each in self.pairs if each.kind in ("differs", "unfit")]

    @property
    def first(self) -> PairErrors | None:
        """The first difference, a local one before those that are carried."""
        local = (each for each in self.different if each.origin == "local")
        return next(local, None) or next(iter(self.different), None)

    def worst_first(self) -> list[PairErrors]:
        return sorted(self.different, key=lambda each: each.badness, reverse=True)

    def reasons(self, relative_mse: float | None, *, unpaired: bool = False) -> list[str]:
        """Why it fails; nothing where it passes. NaN is within no limit."""
        compared = [each for each in self.pairs if each.kind != "summary"]
        if not compared:
            return ["nothing was compared: no tensor with values is in both dumps"]
        said = []
        over = [each for each in self.worst_first() if not each.is_within(relative_mse)]
        if over:
            what = over[0].why or f"relative_mse {over[0].relative_mse:.3g} > {relative_mse:g}"
            more = f", and {len(over) - 1} more" if len(over) > 1 else ""
            said.append(f"{what} at {over[0].actual.title}{more}")
        bad = [each for each in self.pairs if each.nonfinite]
        if bad:
            count = sum(each.nonfinite for each in bad)
            said.append(f"{count} values are not finite, first at {bad[0].actual.title}")
        alone = len(self.only_actual) + len(self.only_reference)
        if relative_mse is not None and alone and not unpaired:
            said.append(f"{alone} tensors are in one of the dumps only")
        return said


def compare_dumps(
    actual: Dump,
    reference: Dump,
    step: Callable[[int], None] | None = None,
    *,
    workers: Workers | None = None,
    **wanted: object,
) -> DumpComparison:
    """`step` is told the bytes of each pair that is done; `wanted` selects records of both.

    Without `workers` this process compares in several threads, which need no copies.
    """
    pairing = paired(list(actual.records(**wanted)), list(reference.records(**wanted)))
    found: list[PairErrors] = []
    compared = (
        _compared(actual, reference, pairing.pairs)
        if workers is None
        else _compared_elsewhere(actual, reference, pairing.pairs, workers)
    )
    for each in compared:
        found.append(each)
        if step is not None:
            step(nbytes(each.actual) + nbytes(each.reference))
    differs = {
        place: each.kind != "equal" for place, each in enumerate(found) if each.kind != "summary"
    }
    told = origins(pairing, differs)
    located = [replace(each, origin=told.get(place, "")) for place, each in enumerate(found)]
    notes = list(pairing.notes)
    for dump in (actual, reference):
        notes += [f"{dump.folder}: {note}" for note in dump.notes()]
    return DumpComparison(located, pairing.only_actual, pairing.only_reference, notes)


def _compared(actual: Dump, reference: Dump, pairs: list[Twin]) -> Iterator[PairErrors]:
    """In order; several at a time, as most of the work is done without Python's lock."""

    def one(pair: Twin) -> PairErrors:
        return _compare(actual, reference, *pair)

    workers = max(1, min(8, os.cpu_count() or 1, len(pairs)))
    with serial(), ThreadPoolExecutor(workers, thread_name_prefix="qgate-compare") as pool:
        yield from pool.map(one, pairs)


@dataclass(frozen=True)
class _Part:
    """Neighboring pairs of two folders."""

    folders: tuple[urls.Place, urls.Place]
    pairs: tuple[Twin, ...]


def _compared_elsewhere(
    actual: Dump, reference: Dump, pairs: list[Twin], workers: Workers
) -> Iterator[PairErrors]:
    """The same by processes or a cluster, whose nodes see both folders."""
    folders = actual.folder.absolute(), reference.folder.absolute()
    parts = [_Part(folders, tuple(part)) for part in together(pairs, _size)]
    for part, found in zip(parts, outcomes(_compare_part, parts, workers), strict=True):
        if isinstance(found, Failure):
            why = f"it was not compared: {found.reason}"
            yield from (PairErrors(a, r, "unfit", why=why) for a, r in part.pairs)
        else:
            yield from found


def _size(pair: Twin) -> int:
    return sum(nbytes(each) for each in pair)


def _compare_part(part: _Part) -> list[PairErrors]:
    actual, reference = map(opened, part.folders)
    with serial():
        return [_compare(actual, reference, *pair) for pair in part.pairs]


def _compare(actual: Dump, reference: Dump, a: Record, r: Record) -> PairErrors:
    bad = sum(a.nonfinite.values()) + sum(r.nonfinite.values())
    if a.shape != r.shape:
        why = f"shapes {list(a.shape)} and {list(r.shape)}"
        return PairErrors(a, r, "unfit", nonfinite=bad, why=why)
    if a.tensor is None or r.tensor is None:
        return _summaries(a, r, bad)
    if a.dtype == r.dtype and a.tensor.digest and a.tensor.digest == r.tensor.digest:
        return _equal(a, r, bad)
    try:
        tensors = actual.tensor(a, check=False), reference.tensor(r, check=False)
        return _values(a, r, *tensors)
    except QgateError as error:
        return PairErrors(a, r, "unfit", nonfinite=bad, why=str(error))


def _equal(a: Record, r: Record, bad: int) -> PairErrors:
    return PairErrors(a, r, "equal", 0.0, 1.0, 0.0, bad)


def _summaries(a: Record, r: Record, bad: int) -> PairErrors:
    if a.counts is not None and r.counts is not None:
        if a.counts.digest != r.counts.digest:
            why = "the counts of its values differ, and the values were not kept"
            return PairErrors(a, r, "unfit", nonfinite=bad, why=why)
        return PairErrors(a, r, "summary", nonfinite=bad, why="equal counts, no values")
    return PairErrors(a, r, "summary", nonfinite=bad, why="values were not kept")


def _values(a: Record, r: Record, actual: Tensor, reference: Tensor) -> PairErrors:
    if actual.dtype == reference.dtype and _same_bytes(actual, reference):
        return _equal(a, r, 2 * _nonfinite(actual))
    if not actual.numel():
        return _equal(a, r, 0)
    plain = plain_errors(actual, reference)
    if plain is not None:
        told = plain.relative_mse, plain.correlation, plain.max_abs
        return PairErrors(a, r, "differs" if plain.max_abs else "equal", *told)
    found = errors(_float(actual), _float(reference), worst=0)
    bad = found.actual_non_finite.total + found.reference_non_finite.total
    names = ("relative_mse", "correlation", "max_abs")
    relative, correlation, largest = (found.metric(name) for name in names)
    kind: Kind = "equal" if largest == 0 else "differs"
    return PairErrors(a, r, kind, relative, correlation, largest, bad)


def _same_bytes(a: Tensor, r: Tensor) -> bool:
    """A part at a time, so that two that differ are told apart by their beginnings."""
    a, r = _flat(a), _flat(r)
    return all(
        torch.equal(a[i : i + _AT_ONCE], r[i : i + _AT_ONCE]) for i in range(0, len(a), _AT_ONCE)
    )


def _flat(x: Tensor) -> Tensor:
    """As words of eight bytes where there are that many."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) % 8 == 0 and data.data_ptr() % 8 == 0
    return data.view(torch.int64) if whole and len(data) else data


def _nonfinite(x: Tensor) -> int:
    """Of a tensor that no collector has counted them for; looked for in the exponents' bits."""
    if not x.is_floating_point() or not x.numel():
        return 0
    whole = x if x.dtype in _EXPONENTS else x.float()
    word, exponent = _EXPONENTS[whole.dtype]
    flat = whole.contiguous().reshape(-1).view(word)
    parts = (flat[i : i + _IN_CACHE] for i in range(0, len(flat), _IN_CACHE))
    found = 0
    for part in parts:
        sizes = part & torch.iinfo(word).max
        if int(sizes.amax()) >= exponent:
            found += int((sizes >= exponent).sum())
    return found


def _float(x: Tensor) -> Tensor:
    if x.dtype in _EXPONENTS:
        return x
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.is_floating_point() else x.double()
