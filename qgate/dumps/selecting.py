"""Which records are meant: by the fields that tell them apart."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping

from qgate.dumps.records import Record
from qgate.errors import unknown

FIELDS = (
    "layer_type",
    "layer",
    "operation",
    "phase",
    "component",
    "module",
    "name",
    "quant_type",
    "rank",
    "iteration",
    "sample",
    "micro_batch",
    "call",
)

Wanted = Mapping[str, object]


def check_fields(wanted: Wanted) -> dict[str, tuple[object, ...]]:
    """Per field the values that will do; None stands for any."""
    found = {}
    for name, value in wanted.items():
        if name not in FIELDS:
            raise unknown("field to select by", name, FIELDS)
        if isinstance(value, Collection) and not isinstance(value, str):
            found[name] = tuple(value)
        elif value is not None:
            found[name] = (value,)
    return found


def is_wanted(record: Record, wanted: Mapping[str, tuple[object, ...]]) -> bool:
    """Texts may be patterns: `grad_*`."""
    return all(fits(wanted, name, getattr(record, name)) for name in wanted)


def fits(wanted: Mapping[str, tuple[object, ...]], name: str, found: object) -> bool:
    """Whether a field may have a value; one that was not asked about may have any."""
    return name not in wanted or any(_fits(found, value) for value in wanted[name])


def _fits(found: object, value: object) -> bool:
    if isinstance(found, str) and isinstance(value, str):
        return found == value or fnmatch.fnmatchcase(found, value)
    return found == value


class Seen:
    """The values that records have of the fields asked about."""

    def __init__(self, wanted: Mapping[str, tuple[object, ...]]) -> None:
        self._wanted = wanted
        self._there: dict[str, set[object]] = {name: set() for name in wanted}

    def add(self, record: Record) -> None:
        for name, seen in self._there.items():
            seen.add(getattr(record, name))

    def check(self) -> None:
        """An error for a value that no record had; it names those there were."""
        for name, values in self._wanted.items():
            for value in values:
                if not any(_fits(found, value) for found in self._there[name]):
                    listed = [str(found) for found in self._there[name]]
                    what = f"{name.replace('_', ' ')} in this dump"
                    raise unknown(what, str(value), listed)
