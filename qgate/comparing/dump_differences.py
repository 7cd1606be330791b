"""What was found of two dumps: pairs by the million, of which few numbers are kept in memory.

The rest of a pair is in rows that may be on disk, and is put together when it is asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, overload

import numpy as np

from qgate.comparing.pairing import Origin, Pairing
from qgate.dumps import Record, StoredValues
from qgate.dumps.records import plain
from qgate.results.rows import LazySequence, StoredRows

Kind = Literal["equal", "differs", "unfit", "summary"]
_KINDS: tuple[Kind, ...] = ("equal", "differs", "unfit", "summary")
_ORIGINS: tuple[Origin, ...] = ("", "local", "carried", "enters", "unknown")
_NUMBERS = ("relative_mse", "correlation", "max_abs")
_HELD = 1 << 17
T = TypeVar("T")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PairErrors:
    """One tensor of two dumps. A number that cannot be had is NaN, which passes no limit.

    title …    of the actual one; `reference_order` is where the other is in its dump
    kind       unfit: the two cannot be compared; summary: no values were kept to compare
    """

    title: str
    module: str
    rank: int
    order: int
    reference_order: int
    shape: tuple[int, ...]
    kind: Kind
    relative_mse: float = math.nan
    correlation: float = math.nan
    max_abs: float = math.nan
    nonfinite: int = 0
    why: str = ""
    origin: Origin = ""

    @classmethod
    def of(
        cls,
        actual: Record,
        reference: Record,
        kind: Kind,
        relative_mse: float = math.nan,
        correlation: float = math.nan,
        max_abs: float = math.nan,
        **told: Any,
    ) -> PairErrors:
        names = actual.title, actual.module, actual.rank, actual.order, reference.order
        return cls(*names, actual.shape, kind, relative_mse, correlation, max_abs, **told)

    def to_dict(self) -> dict[str, Any]:
        names = ("title", "module", "rank", "order", "shape", "kind", "origin", "why", "nonfinite")
        told = {name: getattr(self, name) for name in names}
        told |= {name: getattr(self, name) for name in _NUMBERS}
        return {**told, "shape": list(self.shape)}


_IN_ROWS = tuple(each.name for each in fields(PairErrors) if each.name not in ("kind", "origin"))


class _Meant(LazySequence[T]):
    """Rows as what they stand for."""

    def __init__(self, rows: Sequence[Any], make: Callable[[Any], T]) -> None:
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def _one(self, place: int) -> T:
        return self._make(self._rows[place])


@dataclass
class _Table:
    """All pairs in the order in which they were compared: what is looked for, and the rest."""

    rows: StoredRows[dict[str, Any]]
    kinds: Array
    origins: Array
    bad: Array
    relative_mse: Array
    max_abs: Array

    def __getitem__(self, place: int) -> PairErrors:
        row = self.rows[place]
        told = {name: row[name] for name in _IN_ROWS}
        told |= {name: float(told[name]) for name in _NUMBERS}
        told["shape"] = tuple(told["shape"])
        kind, origin = _KINDS[self.kinds[place]], _ORIGINS[self.origins[place]]
        return PairErrors(**told, kind=kind, origin=origin)


class Pairs(Sequence[PairErrors]):
    """Some of the pairs, in an order."""

    def __init__(self, table: _Table, places: Array) -> None:
        self._table, self._places = table, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> PairErrors: ...
    @overload
    def __getitem__(self, place: slice) -> Pairs: ...
    def __getitem__(self, place: int | slice) -> PairErrors | Pairs:
        if isinstance(place, slice):
            return Pairs(self._table, self._places[place])
        return self._table[int(self._places[place])]

    def of_kind(self, *kinds: Kind) -> Pairs:
        return self._where(np.isin(self._table.kinds[self._places], list(map(_KINDS.index, kinds))))

    def of_origin(self, origin: Origin) -> Pairs:
        return self._where(self._table.origins[self._places] == _ORIGINS.index(origin))

    def not_finite(self) -> Pairs:
        return self._where(self._table.bad[self._places] != 0)

    def beyond(self, relative_mse: float | None) -> Pairs:
        """What cannot be compared, and what has a larger error; NaN is within no limit."""
        beyond = self._table.kinds[self._places] == _KINDS.index("unfit")
        if relative_mse is not None:
            beyond |= ~(self._table.relative_mse[self._places] <= relative_mse)
        return self._where(beyond)

    def worst_first(self) -> Pairs:
        """What has no number is worse than any number."""
        size, largest = (
            getattr(self._table, name)[self._places] for name in ("relative_mse", "max_abs")
        )
        known = ~np.isnan(size)
        size[~known] = largest[~known] = 0
        return Pairs(self._table, self._places[np.lexsort((-largest, -size, known))])

    def _where(self, chosen: Array) -> Pairs:
        return Pairs(self._table, self._places[chosen])


@dataclass
class DumpComparison:
    """All pairs in the order of execution, what had no counterpart, and what was said of both.

    nonfinite   how many values of all pairs are not finite
    """

    pairs: Pairs
    only_actual: Sequence[Record]
    only_reference: Sequence[Record]
    notes: Sequence[str]
    nonfinite: int = 0

    def of_kind(self, kind: Kind) -> Pairs:
        return self.pairs.of_kind(kind)

    @property
    def different(self) -> Pairs:
        """What is not equal, in the order of execution; what cannot be compared is among them."""
        return self.pairs.of_kind("differs", "unfit")

    @property
    def first(self) -> PairErrors | None:
        """The first difference, a local one before those that are carried."""
        different = self.different
        first = (different.of_origin("local") or different)[:1]
        return first[0] if first else None

    def worst_first(self) -> Pairs:
        return self.different.worst_first()

    def reasons(self, relative_mse: float | None, *, unpaired: bool = False) -> list[str]:
        """Why it fails; nothing where it passes. NaN is within no limit."""
        if len(self.pairs) == len(self.of_kind("summary")):
            return ["nothing was compared: no tensor with values is in both dumps"]
        said = []
        over = self.different.beyond(relative_mse).worst_first()
        if over:
            worst = over[0]
            what = worst.why or f"relative_mse {worst.relative_mse:.3g} > {relative_mse:g}"
            more = f", and {len(over) - 1} more" if len(over) > 1 else ""
            said.append(f"{what} at {worst.title}{more}")
        if self.nonfinite:
            first = self.pairs.not_finite()[0]
            said.append(f"{self.nonfinite} values are not finite, first at {first.title}")
        alone = len(self.only_actual) + len(self.only_reference)
        if relative_mse is not None and alone and not unpaired:
            said.append(f"{alone} tensors are in one of the dumps only")
        return said


# As they are found -----------------------------------------------------------------------------


@dataclass
class Findings:
    """Filled rank after rank, so that what is in memory of a pair is 43 bytes."""

    _rows: StoredRows[dict[str, Any]] = field(default_factory=lambda: StoredRows(held=_HELD))
    _kinds: array[int] = field(default_factory=lambda: array("B"))
    _origins: array[int] = field(default_factory=lambda: array("B"))
    _bad: array[int] = field(default_factory=lambda: array("B"))
    _orders: array[int] = field(default_factory=lambda: array("q"))
    _relative_mse: array[float] = field(default_factory=lambda: array("d"))
    _max_abs: array[float] = field(default_factory=lambda: array("d"))
    _nonfinite: int = 0
    _only: tuple[StoredRows[dict[str, Any]], ...] = field(
        default_factory=lambda: (StoredRows(held=_HELD), StoredRows(held=_HELD))
    )
    _apart: array[int] = field(default_factory=lambda: array("B"))
    _notes: StoredRows[dict[str, Any]] = field(default_factory=lambda: StoredRows(held=_HELD))

    def add(self, pair: PairErrors) -> None:
        told = {name: getattr(pair, name) for name in _IN_ROWS}
        told |= {name: plain(told[name]) for name in _NUMBERS}
        self._rows.append({**told, "shape": list(pair.shape)})
        self._kinds.append(_KINDS.index(pair.kind))
        self._bad.append(pair.nonfinite != 0)
        self._nonfinite += pair.nonfinite
        self._orders.append(pair.order)
        self._relative_mse.append(pair.relative_mse)
        self._max_abs.append(pair.max_abs)

    def add_origins(self, count: int, told: Mapping[int, Origin]) -> None:
        """Of the pairs of one rank, by their place among them."""
        self._origins.extend(_ORIGINS.index(told.get(place, "")) for place in range(count))

    def add_rest(self, pairing: Pairing) -> None:
        """What one rank has beside its pairs."""
        for rows, alone in zip(
            self._only, (pairing.only_actual, pairing.only_reference), strict=True
        ):
            for record in alone:
                rows.append(record.to_dict())
        apart = pairing.apart
        self._apart.extend([0] * (len(pairing.only_reference) - apart) + [1] * apart)
        self.add_notes(pairing.notes)

    def add_notes(self, notes: Iterable[str]) -> None:
        for note in notes:
            self._notes.append({"note": note})

    def whole(self) -> DumpComparison:
        """In the order of execution; ranks came in theirs, and so it is kept among equals."""
        places = np.argsort(np.asarray(self._orders), kind="stable")
        table = _Table(
            self._rows,
            np.asarray(self._kinds),
            np.asarray(self._origins),
            np.asarray(self._bad),
            np.asarray(self._relative_mse),
            np.asarray(self._max_abs),
        )
        self._let_one_enter(table, places)
        actual, reference = self._only
        later = np.argsort(np.asarray(self._apart), kind="stable")
        return DumpComparison(
            Pairs(table, places),
            _Meant(actual, _record_of),
            _Meant(reference.ordered(_each(later)), _record_of),
            _Meant(self._notes, lambda row: row["note"]),
            self._nonfinite,
        )

    @staticmethod
    def _let_one_enter(table: _Table, places: Array) -> None:
        """What enters a rank is carried there if another rank had a difference before it."""
        enters, carried = map(_ORIGINS.index, ("enters", "carried"))
        told = table.origins[places]
        first = int(np.argmax(told != 0)) if len(told) else 0
        later = places[first + 1 :]
        table.origins[later[told[first + 1 :] == enters]] = carried


def _each(places: Array) -> Iterator[int]:
    return (int(place) for place in places)


def _record_of(row: Mapping[str, Any]) -> Record:
    """What `Record.to_dict` told; it is not in doubt."""
    told = plain(row)
    for name in ("tensor", "counts"):
        if name in told:
            told[name] = StoredValues(**told[name])
    if "stats" in told:
        told["stats"] = {name: float(value) for name, value in told["stats"].items()}
    return Record(**{**told, "shape": tuple(told["shape"])})
