"""Plain data of records, as JSON can hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def add_fields(kind: type[T], a: T, b: T) -> T:
    """Add the fields of a kind of records; what one of them does not have is None in the sum."""
    return kind(**{f.name: _sum(getattr(a, f.name), getattr(b, f.name)) for f in fields(kind)})


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


def plain_data(record: DataclassInstance) -> dict[str, object]:
    """Return a record as plain data; numbers that are not finite are None."""
    return {name: _plain(value) for name, value in asdict(record).items()}


def json_text(record: DataclassInstance) -> str:
    """Write a record as JSON; numbers that are not finite are null."""
    return json.dumps(plain_data(record), indent=1, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def plain(value: Any) -> Any:
    """Return data for JSON: numbers that are not finite, and other objects, become texts."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(value.item())
    return str(value)[:200].removeprefix("torch.")
