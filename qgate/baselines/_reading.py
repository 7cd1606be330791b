"""JSON from outside, believed field by field; an error names file, place, fault and way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from qgate.errors import QgateError


class Fields:
    """One JSON object and the place it stands at."""

    def __init__(self, value: object, file: str, remedy: str, place: str = "") -> None:
        self.file, self.remedy, self.place = file, remedy, place
        if not isinstance(value, dict):
            raise self.wrong(f"{place or 'the content'} is {_shown(value)}, not an object")
        self._value: dict[str, Any] = value

    def wrong(self, what: str) -> QgateError:
        return QgateError(f"{self.file}: {what}. {self.remedy}")

    def _at(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def check_header(self, kind: str, version: int) -> int:
        """Return its version, if it is what the file name says and this qgate knows that."""
        if self._value.get("qgate") != kind:
            raise self.wrong(f"it is no {kind} of qgate")
        found = self.whole("version", 1)
        check_version(self.file, found, version)
        return found

    def only(self, *names: str) -> None:
        """That no other field is there: one that is not understood is not passed over."""
        for name in self._value:
            if name not in names:
                raise self.wrong(f"{self._at(name)!r} is not a known field")

    def has(self, name: str) -> bool:
        """Whether a field is there."""
        return name in self._value

    def _get(self, name: str, good: Callable[[Any], object], wanted: str) -> Any:
        if name not in self._value:
            raise self.wrong(f"{self._at(name)} is missing")
        value = self._value[name]
        if not good(value):
            raise self.wrong(f"{self._at(name)} is {_shown(value)}, not {wanted}")
        return value

    def text(self, name: str, *, empty: bool = False) -> str:
        found: str = self._get(name, lambda v: isinstance(v, str) and (v or empty), "a text")
        return found

    def text_or_none(self, name: str) -> str | None:
        found: str | None = self._get(
            name, lambda v: v is None or (isinstance(v, str) and v), "a text or null"
        )
        return found

    def lists_of_texts(self, name: str) -> list[list[str]]:
        """A list of lists of texts; empty where the field is not there."""
        if name not in self._value:
            return []

        def good(value: Any) -> bool:
            return isinstance(value, list) and all(
                isinstance(each, list) and all(isinstance(part, str) for part in each)
                for each in value
            )

        found: list[list[str]] = self._get(name, good, "a list of lists of texts")
        return found

    def whole(self, name: str, least: int) -> int:
        found: int = self._get(
            name, lambda v: type(v) is int and v >= least, f"a whole number from {least}"
        )
        return found

    def flag(self, name: str) -> bool:
        found: bool = self._get(name, lambda v: isinstance(v, bool), "true or false")
        return found

    def number(self, name: str) -> float:
        """A number, with those that JSON does not have as texts."""
        texts = ("nan", "inf", "-inf")
        found = self._get(
            name, lambda v: type(v) in (int, float) or v in texts, "a number, nan or inf"
        )
        try:
            return float(found)
        except OverflowError:
            raise self.wrong(f"{self._at(name)} is too large a number") from None

    def shape(self, name: str) -> tuple[int, ...]:
        found: list[int] = self._get(
            name,
            lambda v: isinstance(v, list) and all(type(n) is int and n >= 0 for n in v),
            "a list of whole numbers",
        )
        return tuple(found)

    def fields(self, name: str) -> Fields:
        found = self._get(name, lambda v: isinstance(v, dict), "an object")
        return Fields(found, self.file, self.remedy, self._at(name))

    def fields_or_none(self, name: str) -> Fields | None:
        return None if name in self._value and self._value[name] is None else self.fields(name)

    def many(self, name: str) -> list[Fields]:
        found = self._get(name, lambda v: isinstance(v, list), "a list")
        places = [f"{self._at(name)}[{index}]" for index in range(len(found))]
        pairs = zip(found, places, strict=True)
        return [Fields(value, self.file, self.remedy, place) for value, place in pairs]

    def names(self) -> list[str]:
        return list(self._value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def check_version(file: str, found: int, known: int) -> None:
    """Refuse a file of a newer qgate, and one older than the version before this one."""
    if found > known:
        raise QgateError(
            f"{file}: it is of version {found}, and this qgate reads version {known}: update qgate."
        )
    if found < known - 1 or found < 1:
        raise QgateError(
            f"{file}: it is of version {found}, and this qgate reads version {known}: record it "
            "again with --update-baselines."
        )


def read_json(data: bytes, file: str, remedy: str) -> Fields:
    """The object in a file; JSON as in the standard, each key once."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refused)
    except json.JSONDecodeError as error:
        raise QgateError(f"{file}:{error.lineno}: it is no JSON ({error.msg}). {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{file}: it is no JSON qgate reads ({error}). {remedy}") from None
    return Fields(value, file, remedy)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number")
