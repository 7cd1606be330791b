"""JSON files of baselines, checked against their types; an error names the way out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, TypeVar, cast

from qgate.baselines.origin import Origin
from qgate.errors import QgateError
from qgate.records import required_fields, validate

T = TypeVar("T")


def check_version(file: str, version: int, current: int, remedy: str) -> None:
    """Refuse a file of another version than the one that is read and written."""
    if version != current:
        raise QgateError(
            f"{file}: it is of version {version}, and this qgate reads version {current}. "
            f"{'Update qgate.' if version > current else remedy}"
        )


def read_json(data: bytes, file: str, remedy: str, kind: str, version: int, hint: type[T]) -> T:
    """Read the object in a file: JSON as in the standard, each key once, and no field unknown.

    It has the fields of an origin, and those of `hint`.
    """
    try:
        value: Any = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse
        )
    except json.JSONDecodeError as error:
        raise QgateError(
            f"{file}:{error.lineno}: it is not valid JSON ({error.msg}). {remedy}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{file}: it is JSON that qgate cannot read ({error}). {remedy}") from None
    with naming(file, remedy):
        validate(value, dict)
        if value.get("qgate") != kind:
            raise ValueError(f"it is not a {kind} of qgate")
        validate(value, _Versioned)
    check_version(file, value["version"], version, remedy)
    of_origin = required_fields(Origin)
    with naming(file, remedy):
        validate(value, Origin)
        validate({k: v for k, v in value.items() if k not in of_origin}, hint, strict=True)
    return cast(T, value)


def read_origin(record: Mapping[str, Any]) -> Origin:
    """Take an origin out of the fields of a file that has others too."""
    return Origin(**{name: record[name] for name in required_fields(Origin)})


@contextlib.contextmanager
def naming(file: str, remedy: str) -> Iterator[None]:
    """Name the file in what is wrong with it, and the way out."""
    try:
        yield
    except (ValueError, QgateError) as error:
        raise QgateError(f"{file}: {str(error).rstrip('.')}. {remedy}") from None


class _Versioned(TypedDict):
    version: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")
