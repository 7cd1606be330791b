"""One look at each tensor of dumps: its portrait, and the pool that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from torch import Tensor

from qgate.drawing.shown import PicturedTensors
from qgate.dumps import Dump, Record
from qgate.dumps.choosing import Located, opened, together
from qgate.dumps.summing import nbytes
from qgate.errors import QgateError
from qgate.results.rows import packed
from qgate.stats import serial
from qgate.storage import places
from qgate.summaries.pooling import Pool, channels_of, pool_of, pool_of_counts, pool_of_statistics
from qgate.summaries.record import TensorPortrait

Group = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Glance:
    """How much of each tensor is looked at; see `DrawingRequest`."""

    formats: tuple[str, ...]
    rows: int
    most: int | None
    seed: int


@dataclass(frozen=True)
class Batch:
    """Neighbors that one process looks at."""

    places: tuple[Located, ...]
    glance: Glance


@dataclass
class Looked:
    """What was found in a batch, tensors packed as rows; one that cannot be read is a note."""

    tensors: list[bytes] = field(default_factory=list)
    shown: PicturedTensors = field(default_factory=PicturedTensors)
    pools: dict[Group, Pool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[tuple[places.Place, int, int]] = field(default_factory=list)


def batches(places: Iterable[Located], glance: Glance) -> Iterator[Batch]:
    """What one process looks at, part by part."""
    for part in together(places, lambda place: nbytes(place.record)):
        yield Batch(tuple(part), glance)


def look(batch: Batch) -> Looked:
    """In one thread: several processes of several threads each are in each other's way."""
    with serial():
        return _looked(batch)


def _looked(batch: Batch) -> Looked:
    found = Looked()
    for place in batch.places:
        try:
            pool, channels = _pool(place, batch.glance)
        except QgateError as error:
            found.notes.append(f"left out: {error}")
            found.lost.append(place.key)
            continue
        portrait = {**_identity(place.record), **pool.portrait()}
        if channels is not None:
            portrait["channels"] = channels
        tensor = cast(TensorPortrait, portrait)
        found.tensors.append(packed(tensor))
        found.shown.add(place, tensor)
        group = _group_of(place.record, pool)
        found.pools[group] = found.pools[group] + pool if group in found.pools else pool
    return found


def _pool(place: Located, glance: Glance) -> tuple[Pool, Any]:
    record = place.record
    if record.tensor is None:
        return pool_of_summary(opened(place.folder), record, glance.formats), None
    values = values_of(place, glance.most)
    pool = pool_of(values, formats=glance.formats, rows=glance.rows, seed=glance.seed)
    if values.numel() < record.elements:
        pool = replace(pool, elements=record.elements)
    return pool, channels_of(values) if values.dim() > 1 else None


def pool_of_summary(dump: Dump, record: Record, names: Sequence[str] = ()) -> Pool:
    """A tensor whose values were not kept: from its counts, or from its statistics alone."""
    told = dict(record.nonfinite)
    if record.counts is None:
        return pool_of_statistics(record.stats, told, record.elements)
    kept = dump.counts(record)
    return pool_of_counts(
        kept["patterns"],
        kept["counts"],
        str(record.extra.get("counted_as") or record.dtype),
        record.stats,
        told,
        record.elements,
        formats=names,
        dtype=record.dtype,
    )


def values_of(place: Located, most: int | None = None) -> Tensor:
    """The values of a record; of a large one the first rows, where only some are looked at."""
    dump, record = opened(place.folder), place.record
    if most is None or record.elements <= most:
        return dump.tensor(record, check=most is None)
    width = record.shape[-1] if len(record.shape) > 1 else 1
    flat = dump.beginning(record, max(1, most // width) * width)
    return flat.reshape(-1, width) if len(record.shape) > 1 else flat


def _identity(record: Record) -> dict[str, Any]:
    names = TensorPortrait.__annotations__.keys() & {each.name for each in fields(record)}
    told = {name: getattr(record, name) for name in names}
    return {"title": record.title, **told, "shape": list(record.shape)}


def _group_of(record: Record, pool: Pool) -> Group:
    return (
        record.quant_type,
        record.layer_type,
        record.operation,
        record.name,
        pool.counted_as,
    )
