"""Two dumps compared, tensor by tensor: what differs first, and how much.

Tensors with the same hash are equal and not read. Of the others the bytes are compared, and where
they differ their errors are taken in one pass over both. Files are mapped, not copied, and not
proved by their hashes: `qgate dumps verify` does that.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.comparing.dump_differences import DumpComparison, Findings, Kind, PairErrors
from qgate.comparing.pairing import Pairing, PairingRule, Twin, origins, paired, rule_of
from qgate.dumps import Dump, Record, nbytes
from qgate.dumps.choosing import opened, together
from qgate.engine import Failure, Workers, outcomes
from qgate.errors import QgateError
from qgate.stats import errors, serial
from qgate.stats.plain_errors import plain_errors
from qgate.storage import places

_EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF << 52),
}
"""The bits of a dtype's infinity, and the integers to read them as."""
_AHEAD = 128
_AT_ONCE = 1 << 22
_IN_CACHE = 1 << 16


def compare_dumps(
    actual: Dump,
    reference: Dump,
    step: Callable[[int], None] | None = None,
    *,
    rule: PairingRule | None = None,
    workers: Workers | None = None,
    **wanted: object,
) -> DumpComparison:
    """`step` is told the bytes of each pair that is done; `wanted` selects records of both.

    One rank after the other is read and compared. Whoever has read all records knows the `rule`.
    Without `workers` this process compares in several threads, which need no copies.
    """
    if rule is None:
        rule = rule_of(*(dump.records(**wanted) for dump in (actual, reference)))
    found = Findings()
    begun: deque[Pairing] = deque()

    def pairs() -> Iterator[Twin]:
        for a, r in _by_rank(actual.records(**wanted), reference.records(**wanted)):
            pairing = paired(a, r, rule)
            found.add_rest(pairing)
            if pairing.pairs:
                begun.append(pairing)
                yield from pairing.pairs

    compared = (
        _compared(actual, reference, pairs())
        if workers is None
        else _compared_elsewhere(actual, reference, pairs(), workers)
    )
    differs: dict[int, bool] = {}
    place = 0
    for each in compared:
        pairing = begun[0]
        found.add(each)
        if step is not None:
            step(_size(pairing.pairs[place]))
        if each.kind != "summary":
            differs[place] = each.kind != "equal"
        place += 1
        if place == len(pairing.pairs):
            found.add_origins(place, origins(pairing, differs))
            begun.popleft()
            differs, place = {}, 0
    for dump in (actual, reference):
        found.add_notes(f"{dump.folder}: {note}" for note in dump.notes())
    return found.whole()


def _by_rank(
    actual: Iterable[Record], reference: Iterable[Record]
) -> Iterator[tuple[list[Record], list[Record]]]:
    """The records of each rank that either dump has; both give them rank after rank."""
    both = heapq.merge(((r.rank, 0, r) for r in actual), ((r.rank, 1, r) for r in reference))
    for _, some in itertools.groupby(both, lambda each: each[0]):
        found: tuple[list[Record], list[Record]] = [], []
        for _, side, record in some:
            found[side].append(record)
        yield found


def _compared(actual: Dump, reference: Dump, pairs: Iterable[Twin]) -> Iterator[PairErrors]:
    """In order; several at a time, as most of the work is done without Python's lock."""
    workers = max(1, min(8, os.cpu_count() or 1))
    waiting: deque[Future[PairErrors]] = deque()
    with serial(), ThreadPoolExecutor(workers, thread_name_prefix="qgate-compare") as pool:
        for pair in pairs:
            waiting.append(pool.submit(_compare, actual, reference, *pair))
            if len(waiting) == _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@dataclass(frozen=True)
class _Part:
    """Neighboring pairs of two folders."""

    folders: tuple[places.Place, places.Place]
    pairs: tuple[Twin, ...]


def _compared_elsewhere(
    actual: Dump, reference: Dump, pairs: Iterable[Twin], workers: Workers
) -> Iterator[PairErrors]:
    """The same by processes or a cluster, whose nodes see both folders."""
    folders = actual.folder.absolute(), reference.folder.absolute()
    sent: deque[_Part] = deque()

    def parts() -> Iterator[_Part]:
        for part in together(pairs, _size):
            sent.append(_Part(folders, tuple(part)))
            yield sent[-1]

    for found in outcomes(_compare_part, parts(), workers):
        part = sent.popleft()
        if isinstance(found, Failure):
            why = f"it was not compared: {found.reason}"
            yield from (PairErrors.of(a, r, "unfit", why=why) for a, r in part.pairs)
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
        return PairErrors.of(a, r, "unfit", nonfinite=bad, why=why)
    if a.tensor is None or r.tensor is None:
        return _summaries(a, r, bad)
    if a.dtype == r.dtype and a.tensor.digest and a.tensor.digest == r.tensor.digest:
        return _equal(a, r, bad)
    try:
        tensors = actual.tensor(a, check=False), reference.tensor(r, check=False)
        return _values(a, r, *tensors)
    except QgateError as error:
        return PairErrors.of(a, r, "unfit", nonfinite=bad, why=str(error))


def _equal(a: Record, r: Record, bad: int) -> PairErrors:
    return PairErrors.of(a, r, "equal", 0.0, 1.0, 0.0, nonfinite=bad)


def _summaries(a: Record, r: Record, bad: int) -> PairErrors:
    if a.counts is not None and r.counts is not None:
        if a.counts.digest != r.counts.digest:
            why = "the counts of its values differ, and the values were not kept"
            return PairErrors.of(a, r, "unfit", nonfinite=bad, why=why)
        return PairErrors.of(a, r, "summary", nonfinite=bad, why="equal counts, no values")
    return PairErrors.of(a, r, "summary", nonfinite=bad, why="values were not kept")


def _values(a: Record, r: Record, actual: Tensor, reference: Tensor) -> PairErrors:
    if actual.dtype == reference.dtype and _same_bytes(actual, reference):
        return _equal(a, r, 2 * _nonfinite(actual))
    if not actual.numel():
        return _equal(a, r, 0)
    plain = plain_errors(actual, reference)
    if plain is not None:
        told = plain.relative_mse, plain.correlation, plain.max_abs
        return PairErrors.of(a, r, "differs" if plain.max_abs else "equal", *told)
    found = errors(_float(actual), _float(reference), worst=0)
    bad = found.actual_non_finite.total + found.reference_non_finite.total
    names = ("relative_mse", "correlation", "max_abs")
    relative, correlation, largest = (found.metric(name) for name in names)
    kind: Kind = "equal" if largest == 0 else "differs"
    return PairErrors.of(a, r, kind, relative, correlation, largest, nonfinite=bad)


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
