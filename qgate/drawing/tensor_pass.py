"""The pass over the tensors of dumps: read each once, summarize it, add it to its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, cast

from torch import Tensor

from qgate.drawing.tensor_maps import Kind, by_channel
from qgate.dumps.choosing import LocatedRecord, open_cached
from qgate.engine import Workers
from qgate.errors import QgateError
from qgate.results.rows import pack_record, unpack_record
from qgate.stats import serial
from qgate.storage import locations
from qgate.summaries.pool import Pool
from qgate.summaries.pooling import channels_of, pool_of, pool_of_counts, pool_of_statistics
from qgate.summaries.record import TensorSummary

Group = tuple[str, str, str, str, str]
FORMATS = ("fp8_e4m3", "fp8_e5m2", "hif8", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "fp16", "bf16")
_MOST_MAPS = 6


@dataclass(frozen=True, kw_only=True)
class DrawingRequest:
    """The settings of an analysis.

    formats   names of formats and dtypes whose losses are measured
    compare   two quant types of the dumps, or two formats; the default is two quant types if the
              dumps have two
    fields    only records with these fields: `{"layer": 3, "name": "grad_*"}`
    rows      elements of each tensor that block formats are measured on, whole rows
    most      elements of each tensor that are read; all by default
    tensors   how many tensors are read, evenly spaced; all by default
    seed      chooses the rows
    workers   processes or another engine that read the tensors
    """

    formats: Sequence[str] = FORMATS
    compare: tuple[str, str] | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    rows: int = 2**16
    most: int | None = None
    tensors: int | None = None
    seed: int = 0
    workers: Workers | int = 1


@dataclass(frozen=True)
class Batch:
    """Neighboring records that one process reads."""

    records: tuple[LocatedRecord, ...]
    request: DrawingRequest


class _Candidate(NamedTuple):
    size: float
    number: int
    site: tuple[str, str]
    record: LocatedRecord
    tensor: bytes

    @property
    def rank(self) -> tuple[float, int]:
        """Sort the best first; of equals the one that came first."""
        return -self.size, self.number


class MapCandidates:
    """Tensors to draw as maps: those whose channels differ most, one of each site, and the first
    attention weights. Only a few are in memory while all tensors pass by."""

    def __init__(self) -> None:
        self._number = 0
        self._widest: dict[tuple[str, str], _Candidate] = {}
        self._attention: list[_Candidate] = []

    def add(self, record: LocatedRecord, tensor: TensorSummary) -> None:
        self._number += 1
        if tensor["source"] != "values":
            return
        site = tensor["module"] or f"{tensor['layer_type']} {tensor['layer']}", tensor["name"]
        channels = tensor.get("channels")
        if channels and channels["count"] >= 8:
            largest = max((size for _, size in channels["largest"]), default=0.0)
            factor = largest / channels["median"] if channels["median"] > 0 else 0.0
            self._take([_Candidate(factor, self._number, site, record, pack_record(tensor))], [])
        if tensor["name"] == "attention_weights":
            self._take([], [_Candidate(0.0, self._number, site, record, pack_record(tensor))])

    def extend(self, other: MapCandidates) -> None:
        """Add the candidates of the tensors that follow, read by another process."""
        widest, attention = (
            [candidate._replace(number=candidate.number + self._number) for candidate in candidates]
            for candidates in (other._widest.values(), other._attention)
        )
        self._take(widest, attention)
        self._number += other._number

    def _take(self, widest: Sequence[_Candidate], attention: Sequence[_Candidate]) -> None:
        for candidate in widest:
            best = self._widest.get(candidate.site)
            if best is None or candidate.rank < best.rank:
                self._widest[candidate.site] = candidate
            if len(self._widest) > _MOST_MAPS:
                del self._widest[max(self._widest, key=lambda site: self._widest[site].rank)]
        self._attention = [*self._attention, *attention][:_MOST_MAPS]

    def best(self) -> list[tuple[Kind, LocatedRecord, TensorSummary]]:
        widest = sorted(self._widest.values(), key=lambda candidate: candidate.rank)
        kinds: dict[Kind, list[_Candidate]] = {"tokens": widest, "attention": self._attention}
        return [
            (kind, candidate.record, cast(TensorSummary, unpack_record(candidate.tensor)))
            for kind, candidates in kinds.items()
            for candidate in candidates
        ]


@dataclass
class BatchSummary:
    """The tensors of a batch, packed as rows, and their groups; an unreadable tensor is a note."""

    tensors: list[bytes] = field(default_factory=list)
    maps: MapCandidates = field(default_factory=MapCandidates)
    pools: dict[Group, Pool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[tuple[locations.Location, int, int]] = field(default_factory=list)


def summarize_batch(batch: Batch) -> BatchSummary:
    """Read a batch in one thread: processes of several threads each would slow each other down."""
    result = BatchSummary()
    with serial():
        for located in batch.records:
            try:
                pool, channels = _pool(located, batch.request)
            except QgateError as error:
                result.notes.append(f"left out: {error}")
                result.lost.append(located.key)
                continue
            record = located.record
            names = TensorSummary.__annotations__.keys() & {own.name for own in fields(record)}
            summary: Any = {
                "title": record.title,
                **{name: getattr(record, name) for name in names},
                "shape": list(record.shape),
                **pool.summary(),
            }
            if channels is not None:
                summary["channels"] = channels
            result.tensors.append(pack_record(summary))
            result.maps.add(located, summary)
            group = (
                record.quant_type, record.layer_type, record.operation, record.name,
                pool.counted_as,
            )  # fmt: skip
            result.pools[group] = result.pools[group] + pool if group in result.pools else pool
    return result


def _pool(located: LocatedRecord, request: DrawingRequest) -> tuple[Pool, Any]:
    """Pool a tensor by its values or, where the dump has none, by its counts or statistics."""
    record, names = located.record, request.formats
    if record.tensor is not None:
        values = values_of(located, request.most)
        pool = pool_of(values, formats=names, rows=request.rows, seed=request.seed)
        if values.numel() < record.elements:
            pool = replace(pool, elements=record.elements)
        ordered = by_channel(record, values)
        return pool, channels_of(ordered) if ordered.dim() > 1 else None
    nonfinite = dict(record.nonfinite)
    if record.counts is None:
        return pool_of_statistics(record.stats, nonfinite, record.elements), None
    counts = open_cached(located.folder).counts(record)
    counted_as = str(record.extra.get("counted_as") or record.dtype)
    pool = pool_of_counts(
        counts["patterns"], counts["counts"], counted_as, record.stats, nonfinite, record.elements,
        formats=names, dtype=record.dtype,
    )  # fmt: skip
    return pool, None


def values_of(located: LocatedRecord, most: int | None = None) -> Tensor:
    """Read the values of a record; with `most`, only the first rows of a large one."""
    dump, record = open_cached(located.folder), located.record
    if most is None or record.elements <= most:
        return dump.tensor(record, check=most is None)
    width = record.shape[-1] if len(record.shape) > 1 else 1
    flat = dump.beginning(record, max(1, most // width) * width)
    return flat.reshape(-1, width) if len(record.shape) > 1 else flat
