"""Compared pairs of two dumps by the million, with few numbers of each in memory.

The others are in rows that may be on disk; a pair is read from them when it is used.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from qgate.charts.overviews import Overview, Overviewed
from qgate.comparing.pairing import Origin, Pairing
from qgate.dumps import Record, StoredValues
from qgate.records.plain_data import plain
from qgate.results.rows import LazySequence, StoredRows
from qgate.text import counted

Kind = Literal["equal", "differs", "unfit", "summary"]
_KINDS, _ORIGINS = get_args(Kind), get_args(Origin)
_NUMBERS = ("relative_mse", "correlation", "max_abs")
_PUBLISHED = (
    "title", "module", "rank", "order", "shape", "kind", "origin", "why", "nonfinite", *_NUMBERS,
)  # fmt: skip
_COLUMNS = {"kind": "B", "origin": "B", "bad": "B", "order": "q", "relative_mse": "d",
            "max_abs": "d"}  # fmt: skip
_ROWS_IN_MEMORY = 1 << 17
T = TypeVar("T")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PairErrors:
    """Errors of one tensor of two dumps. A missing number is NaN, which passes no limit.

    title …    of the actual tensor; `reference_order` is the order of the other in its dump
    kind       unfit: the two cannot be compared; summary: there are no stored values to compare
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
        cls, actual: Record, reference: Record, kind: Kind, *numbers: float, **more: Any
    ) -> PairErrors:
        names = actual.title, actual.module, actual.rank, actual.order, reference.order
        more |= dict(zip(_NUMBERS, numbers, strict=False))
        return cls(*names, actual.shape, kind, **more)

    def to_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _PUBLISHED} | {"shape": list(self.shape)}


_IN_ROWS = tuple(own.name for own in fields(PairErrors) if own.name not in ("kind", "origin"))


@dataclass(frozen=True)
class Pairs(LazySequence[PairErrors]):
    """Some of the compared pairs, by their numbers in the order in which they were compared."""

    rows: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Array]
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    def _one(self, index: int) -> PairErrors:
        number = int(self.numbers[index])
        row = dict(self.rows[number])
        row |= {name: float(row[name]) for name in _NUMBERS}
        row |= {
            "shape": tuple(row["shape"]),
            "kind": _KINDS[self.columns["kind"][number]],
            "origin": _ORIGINS[self.columns["origin"][number]],
        }
        return PairErrors(**row)

    def column(self, name: str) -> Array:
        return self.columns[name][self.numbers]

    def where(self, mask: Array) -> Pairs:
        return Pairs(self.rows, self.columns, self.numbers[mask])

    def of_kind(self, *kinds: Kind) -> Pairs:
        return self.where(np.isin(self.column("kind"), list(map(_KINDS.index, kinds))))

    def of_origin(self, origin: Origin) -> Pairs:
        return self.where(self.column("origin") == _ORIGINS.index(origin))

    def not_finite(self) -> Pairs:
        return self.where(self.column("bad") != 0)

    def beyond(self, relative_mse: float | None) -> Pairs:
        """Select pairs that cannot be compared or have a larger error; NaN is within no limit."""
        beyond = self.column("kind") == _KINDS.index("unfit")
        if relative_mse is not None:
            beyond |= ~(self.column("relative_mse") <= relative_mse)
        return self.where(beyond)

    def worst_first(self) -> Pairs:
        """Sort the pairs by relative MSE; those without a number come first."""
        size, largest = self.column("relative_mse"), self.column("max_abs")
        has_number = ~np.isnan(size)
        size[~has_number] = largest[~has_number] = 0
        return self.where(np.lexsort((-largest, -size, has_number)))


@dataclass(repr=False)
class DumpComparison(Overviewed):
    """All pairs in the order of execution, records without a counterpart, and notes on both dumps.

    nonfinite   number of values in all pairs that are not finite
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
        """Pairs that are not equal or cannot be compared, in the order of execution."""
        return self.pairs.of_kind("differs", "unfit")

    @property
    def first(self) -> PairErrors | None:
        """The first local difference, or the first of all where none is local."""
        different = self.different
        return next(iter(different.of_origin("local") or different), None)

    def worst_first(self) -> Pairs:
        return self.different.worst_first()

    def overview(self) -> Overview:
        """Describe the comparison: where dumps differ first, and the pairs that differ most."""
        different, alone = self.worst_first(), len(self.only_actual) + len(self.only_reference)
        title = f"{counted(len(self.pairs), 'pair')} of tensors: {len(different):,} differ"
        title += f", {alone:,} tensors are in one dump only" if alone else ""
        first = [f"first at {self.first.title}"] if self.first else []
        lines = [*first, *self.notes]
        return Overview(title, different, _pair_row, "pair", lines, "relative MSE")

    def reasons(self, relative_mse: float | None, *, unpaired: bool = False) -> list[str]:
        """List the reasons why the comparison fails; none if it passes. NaN is within no limit."""
        if len(self.pairs) == len(self.of_kind("summary")):
            return ["nothing was compared: no tensor with values is in both dumps"]
        reasons = []
        over = self.different.beyond(relative_mse).worst_first()
        if over:
            worst = over[0]
            problem = worst.why or f"relative_mse {worst.relative_mse:.3g} > {relative_mse:g}"
            more = f", and {len(over) - 1} more" if len(over) > 1 else ""
            reasons.append(f"{problem} at {worst.title}{more}")
        if self.nonfinite:
            first = self.pairs.not_finite()[0]
            reasons.append(f"{self.nonfinite} values are not finite, first at {first.title}")
        alone = len(self.only_actual) + len(self.only_reference)
        if relative_mse is not None and alone and not unpaired:
            reasons.append(f"{alone} tensors are in one of the dumps only")
        return reasons


def _pair_row(pair: PairErrors) -> dict[str, object]:
    return {
        "tensor": pair.title,
        "difference": pair.why or pair.origin or pair.kind,
        "relative MSE": pair.relative_mse,
        "largest": pair.max_abs,
    }


# While they are compared -------------------------------------------------------------------------


class _MappedRows(LazySequence[T]):
    """Rows, each converted when it is read."""

    def __init__(self, rows: Sequence[Any], convert: Callable[[Any], T]) -> None:
        self._rows, self._convert = rows, convert

    def __len__(self) -> int:
        return len(self._rows)

    def _one(self, index: int) -> T:
        return self._convert(self._rows[index])


def _rows() -> StoredRows[dict[str, object]]:
    return StoredRows(held=_ROWS_IN_MEMORY)


@dataclass
class ComparedPairs:
    """Collector of compared pairs, rank after rank; a pair takes 43 bytes of memory.

    _ungrouped   per record of the reference alone: 1 if the other dump lacks its group
    """

    _pairs: StoredRows[dict[str, object]] = field(default_factory=_rows)
    _columns: dict[str, array[Any]] = field(
        default_factory=lambda: {name: array(code) for name, code in _COLUMNS.items()}
    )
    _only_actual: StoredRows[dict[str, object]] = field(default_factory=_rows)
    _only_reference: StoredRows[dict[str, object]] = field(default_factory=_rows)
    _ungrouped: array[int] = field(default_factory=lambda: array("B"))
    _notes: StoredRows[dict[str, object]] = field(default_factory=_rows)
    _nonfinite: int = 0

    def add(self, pair: PairErrors) -> None:
        row = {name: getattr(pair, name) for name in _IN_ROWS}
        row |= {name: plain(row[name]) for name in _NUMBERS}
        self._pairs.append({**row, "shape": list(pair.shape)})
        self._nonfinite += pair.nonfinite
        numbers = {"kind": _KINDS.index(pair.kind), "bad": pair.nonfinite != 0}
        for name in _COLUMNS.keys() - {"origin"}:
            self._columns[name].append(numbers.get(name, getattr(pair, name, None)))

    def add_origins(self, count: int, origins: Mapping[int, Origin]) -> None:
        """Add the origins of the pairs of one rank, by their number among them."""
        self._columns["origin"].extend(_ORIGINS.index(origins.get(i, "")) for i in range(count))

    def add_unpaired(self, pairing: Pairing) -> None:
        """Add the records of one rank without a counterpart, and the notes on its pairs."""
        for record in pairing.only_actual:
            self._only_actual.append(record.to_dict())
        for record in pairing.only_reference:
            self._only_reference.append(record.to_dict())
        ungrouped = pairing.ungrouped
        self._ungrouped.extend([0] * (len(pairing.only_reference) - ungrouped) + [1] * ungrouped)
        self.add_notes(pairing.notes)

    def add_notes(self, notes: Iterable[str]) -> None:
        for note in notes:
            self._notes.append({"note": note})

    def whole(self) -> DumpComparison:
        """Return the comparison with pairs in the order of execution, equal orders by rank."""
        columns = {name: np.asarray(values) for name, values in self._columns.items()}
        numbers = np.argsort(columns["order"], kind="stable")
        # A difference that enters a rank is carried there if another rank had one before it.
        enters, carried = map(_ORIGINS.index, ("enters", "carried"))
        origins = columns["origin"][numbers]
        first = int(np.argmax(origins != 0)) if len(origins) else 0
        later = numbers[first + 1 :]
        columns["origin"][later[origins[first + 1 :] == enters]] = carried
        grouped_first = np.argsort(np.asarray(self._ungrouped), kind="stable").tolist()
        return DumpComparison(
            Pairs(self._pairs, columns, numbers),
            _MappedRows(self._only_actual, _record_of),
            _MappedRows(self._only_reference.ordered(grouped_first), _record_of),
            _MappedRows(self._notes, lambda row: row["note"]),
            self._nonfinite,
        )


def _record_of(row: Mapping[str, Any]) -> Record:
    """Read a record that `Record.to_dict` wrote; it needs no checks."""
    fields_of = plain(row)
    for name in {"tensor", "counts"} & fields_of.keys():
        fields_of[name] = StoredValues(**fields_of[name])
    if "stats" in fields_of:
        fields_of["stats"] = {name: float(value) for name, value in fields_of["stats"].items()}
    return Record(**{**fields_of, "shape": tuple(fields_of["shape"])})
