"""Compare two dumps tensor by tensor: find the first difference, and measure all of them.

Tensors with the same hash are equal and not read. The bytes of the others are compared, and where
they differ one pass over both measures the errors. Files are mapped, not copied, and not proved by
their hashes: `qgate dumps verify` does that.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qgate.comparing.dump_differences import ComparedPairs, DumpComparison, Kind, PairErrors
from qgate.comparing.pairing import Pairing, PairingRule, RecordPair, origins, pair_records, rule_of
from qgate.dumps import Dump, Record, nbytes
from qgate.dumps.choosing import batches, open_cached
from qgate.engine import Failure, Workers, map_items
from qgate.errors import QgateError
from qgate.stats import errors, serial
from qgate.stats.plain_errors import plain_errors
from qgate.stats.threads import in_order
from qgate.storage import locations

_EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF << 52),
}
"""Per dtype: the integers that hold its bits, and the bits of infinity."""
_METRICS = ("relative_mse", "correlation", "max_abs")
_EQUAL = (0.0, 1.0, 0.0)
_AHEAD = 128
_BYTES_AT_ONCE = 1 << 22
_IN_CACHE = 1 << 16


def compare_dumps(
    actual: Dump,
    reference: Dump,
    step: Callable[[int], None] | None = None,
    *,
    rule: PairingRule | None = None,
    workers: Workers | None = None,
    **fields: object,
) -> DumpComparison:
    """Compare the records of both dumps that `fields` select, rank after rank.

    `step` gets the bytes of each pair. `rule` is `rule_of` the selected records, if the caller has
    read them. Without `workers` this process compares in several threads, which need no copies.
    """
    if rule is None:
        rule = rule_of(*(dump.records(**fields) for dump in (actual, reference)))
    total = ComparedPairs()
    pending: deque[Pairing] = deque()

    def pairs() -> Iterator[RecordPair]:
        for a, r in _by_rank(actual.records(**fields), reference.records(**fields)):
            pairing = pair_records(a, r, rule)
            total.add_unpaired(pairing)
            if pairing.pairs:
                pending.append(pairing)
                yield from pairing.pairs

    if workers is None:
        # Several at a time: most of the work runs without Python's lock.
        threads = max(1, min(8, os.cpu_count() or 1))
        compare = lambda pair: _compare(actual, reference, *pair)  # noqa: E731
        compared = in_order(compare, pairs(), threads, _AHEAD)
    else:
        compared = _compared_by_workers(actual, reference, pairs(), workers)
    differs: dict[int, bool] = {}
    index = 0
    for pair in compared:
        pairing = pending[0]
        total.add(pair)
        if step is not None:
            step(_size(pairing.pairs[index]))
        if pair.kind != "summary":
            differs[index] = pair.kind != "equal"
        index += 1
        if index == len(pairing.pairs):
            total.add_origins(index, origins(pairing, differs))
            pending.popleft()
            differs, index = {}, 0
    for dump in (actual, reference):
        total.add_notes(f"{dump.folder}: {note}" for note in dump.notes())
    return total.whole()


def _by_rank(
    actual: Iterable[Record], reference: Iterable[Record]
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Group the records of both dumps by rank; each dump has them rank after rank."""
    merged = heapq.merge(((r.rank, 0, r) for r in actual), ((r.rank, 1, r) for r in reference))
    for _, of_rank in itertools.groupby(merged, lambda item: item[0]):
        sides: tuple[list[Record], list[Record]] = [], []
        for _, side, record in of_rank:
            sides[side].append(record)
        yield sides


def _compared_by_workers(
    actual: Dump, reference: Dump, pairs: Iterable[RecordPair], workers: Workers
) -> Iterator[PairErrors]:
    """Compare pairs by processes or a cluster, whose nodes see both folders."""
    folders = actual.folder.absolute(), reference.folder.absolute()
    to_report, to_send = itertools.tee(batches(pairs, _size))
    compared = map_items(_compare_batch, to_send, workers, shared=folders)
    for batch, errors_of in zip(to_report, compared, strict=True):
        if isinstance(errors_of, Failure):
            why = f"it was not compared: {errors_of.reason}"
            yield from (PairErrors.of(a, r, "unfit", why=why) for a, r in batch)
        else:
            yield from errors_of


def _size(pair: RecordPair) -> int:
    return sum(map(nbytes, pair))


def _compare_batch(
    pairs: Sequence[RecordPair], folders: tuple[locations.Location, locations.Location]
) -> list[PairErrors]:
    actual, reference = map(open_cached, folders)
    with serial():
        return [_compare(actual, reference, *pair) for pair in pairs]


def _compare(actual: Dump, reference: Dump, a: Record, r: Record) -> PairErrors:
    def pair(kind: Kind, why: str = "") -> PairErrors:
        bad = sum(a.nonfinite.values()) + sum(r.nonfinite.values())
        return PairErrors.of(a, r, kind, *(_EQUAL if kind == "equal" else ()), nonfinite=bad,
                             why=why)  # fmt: skip

    if a.shape != r.shape:
        return pair("unfit", f"shapes {list(a.shape)} and {list(r.shape)}")
    if a.tensor is None or r.tensor is None:
        if a.counts is None or r.counts is None:
            return pair("summary", "values were not kept")
        if a.counts.digest == r.counts.digest:
            return pair("summary", "equal counts, no values")
        return pair("unfit", "the counts of its values differ, and the values were not kept")
    if a.dtype == r.dtype and a.tensor.digest and a.tensor.digest == r.tensor.digest:
        return pair("equal")
    try:
        return _values(a, r, actual.tensor(a, check=False), reference.tensor(r, check=False))
    except QgateError as error:
        return pair("unfit", str(error))


def _values(a: Record, r: Record, actual: Tensor, reference: Tensor) -> PairErrors:
    if actual.dtype == reference.dtype and _same_bytes(actual, reference):
        return PairErrors.of(a, r, "equal", *_EQUAL, nonfinite=2 * _nonfinite(actual))
    if not actual.numel():
        return PairErrors.of(a, r, "equal", *_EQUAL)
    bad = 0
    numbers: Sequence[float] | None = plain_errors(actual, reference)
    if numbers is None:
        sums = errors(_float(actual), _float(reference), worst=0)
        bad = sums.actual_non_finite.total + sums.reference_non_finite.total
        numbers = list(map(sums.metric, _METRICS))
    return PairErrors.of(a, r, "differs" if numbers[-1] != 0 else "equal", *numbers, nonfinite=bad)


def _same_bytes(a: Tensor, r: Tensor) -> bool:
    """Compare bytes in parts, so that a difference at the beginning ends it."""
    a, r = _flat(a), _flat(r)
    return all(
        torch.equal(a[i : i + _BYTES_AT_ONCE], r[i : i + _BYTES_AT_ONCE])
        for i in range(0, len(a), _BYTES_AT_ONCE)
    )


def _flat(x: Tensor) -> Tensor:
    """View the values as words of eight bytes, if they divide into such, else as bytes."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) % 8 == 0 and data.data_ptr() % 8 == 0
    return data.view(torch.int64) if whole and len(data) else data


def _nonfinite(x: Tensor) -> int:
    """Count values that are not finite by the bits of their exponents."""
    if not x.is_floating_point() or not x.numel():
        return 0
    whole = x if x.dtype in _EXPONENTS else x.float()
    word, exponent = _EXPONENTS[whole.dtype]
    count = 0
    for part in whole.contiguous().reshape(-1).view(word).split(_IN_CACHE):
        sizes = part & torch.iinfo(word).max
        if int(sizes.amax()) >= exponent:
            count += int((sizes >= exponent).sum())
    return count


def _float(x: Tensor) -> Tensor:
    if x.dtype in _EXPONENTS:
        return x
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.is_floating_point() else x.double()
