"""Tensors in what modules take and return: tuples, mappings and dataclasses, one in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

_DEEP = 16


def walk_tensors(value: Any, label: str = "", depth: int = _DEEP) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value in order, each with its path."""
    if isinstance(value, Tensor):
        yield label, value
        return
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        pairs = [(name, getattr(value, name, None)) for name in value.__dataclass_fields__]
    for key, item in pairs if depth else ():
        yield from walk_tensors(item, f"{label}.{key}", depth - 1)


def first_float_tensor(value: Any) -> Tensor | None:
    """Return the first tensor of floating-point numbers in a nested value; None without one."""
    return next((x for _, x in walk_tensors(value) if x.is_floating_point()), None)
