"""Write values as short text: whole where they are few, by figures that see each change where not."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

FEW = 12
MOST_ROWS = 30
WIDE = 110


def number_text(value: float) -> str:
    """A number in nine digits, which is finer than the comparison; only integers lack a point."""
    if isinstance(value, (bool, np.bool_)):
        return json.dumps(bool(value))
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    text = f"{float(value):.9g}"
    return f"{text}.0" if text.lstrip("-").isdecimal() else text


def scalar_text(value: object) -> str:
    if isinstance(value, (float, np.floating)):
        return number_text(float(value))
    return json.dumps(value, ensure_ascii=False, default=str)


def array_text(values: object) -> str:
    """Numbers: all of a few; else size, count, extremes, means, the first and the last.

    The means are of magnitudes, which do not cancel, once plain and once weighted by position, so
    that values which trade places show.
    """
    array = np.asarray(values)
    flat = array.ravel()
    if flat.size <= FEW:
        return "[" + ", ".join(number_text(value) for value in flat.tolist()) + "]"
    exact = flat.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    parts = ["×".join(map(str, array.shape))]
    if finite.size:
        sizes = np.abs(finite)
        scale = float(sizes.max()) or 1.0
        weights = np.arange(1, finite.size + 1) / finite.size
        figures = {
            "min": finite.min(),
            "max": finite.max(),
            "mean|x|": scale * float((sizes / scale).mean()),
            "tilt": scale * float((sizes / scale * weights).mean()),
        }
        parts += [f"{name} {number_text(float(value))}" for name, value in figures.items()]
        parts.append(f"{int((finite > 0).sum())} above 0")
    if finite.size < exact.size:
        parts.append(f"{exact.size - finite.size} not finite")
    ends = [", ".join(number_text(v) for v in part.tolist()) for part in (flat[:3], flat[-3:])]
    return f"<{', '.join(parts)}: {ends[0]} … {ends[1]}>"


def texts_text(values: Sequence[str]) -> str:
    """Texts by how often they occur; of many different ones the first and the last."""
    counted = Counter(values)
    if len(counted) <= FEW:
        return ", ".join(
            f"{json.dumps(name, ensure_ascii=False)} ×{n}" for name, n in counted.items()
        )
    ends = [json.dumps(values[i], ensure_ascii=False) for i in (0, 1, -1)]
    return f"{len(counted)} different: {ends[0]}, {ends[1]} … {ends[2]}"


# JSON ------------------------------------------------------------------------------------------


def json_lines(value: object, indent: int = 0) -> Iterator[str]:
    """A value in lines, nested by indents; long lists are summarized."""
    pad = " " * indent
    short = _one_line(value)
    if short is not None and len(short) + indent <= WIDE:
        yield pad + short
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            inner = _one_line(entry)
            if inner is not None and len(inner) + indent <= 10 * WIDE:
                yield f"{pad}{name}: {inner}"
            else:
                yield f"{pad}{name}:"
                yield from json_lines(entry, indent + 1)
    elif isinstance(value, list):
        yield from (pad + line for line in _list_lines(value))
    else:
        yield pad + scalar_text(value)


def _one_line(value: object) -> str | None:
    """The text of a scalar, of numbers, or of a short list or mapping of them."""
    if isinstance(value, list):
        if value and all(_is_number(number) for number in value):
            return array_text([math.nan if scalar is None else scalar for scalar in value])
        parts = [_one_line(item) for item in value[: FEW + 1]]
        if len(value) > FEW or any(part is None for part in parts):
            return None
        text = "[" + ", ".join(part or "" for part in parts) + "]"
        return text if len(text) <= WIDE else None
    if isinstance(value, Mapping):
        parts = [_one_line(entry) for entry in value.values()]
        if any(part is None for part in parts):
            return None
        named = zip(value, parts, strict=True)
        text = "{" + ", ".join(f"{name}: {part}" for name, part in named) + "}"
        return text if len(text) <= WIDE else None
    return scalar_text(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_lines(values: list[Any]) -> Iterator[str]:
    if all(isinstance(item, str) for item in values) and len(values) > MOST_ROWS:
        yield texts_text(values)
    elif len(values) > FEW and any(isinstance(element, (Mapping, list)) for element in values):
        yield from table_lines([dict(_leaves(row)) for row in values])
    else:
        for entry in values:
            lines = list(json_lines(entry))
            yield f"- {lines[0] if lines else ''}"
            yield from (f"  {line}" for line in lines[1:])


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Scalars by their path; numbers of a list go by its path and place."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}[{i}]" if i < FEW else f"{name}[…]")
    else:
        yield name, value


def table_lines(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Rows with the same names: the first, the last, and a summary of each column."""
    yield f"{len(rows)} rows"
    for label, row in (("first", rows[0]), ("last", rows[-1])):
        cells = ", ".join(f"{name} {scalar_text(value)}" for name, value in _few(row))
        yield f"  {label}: {cells}"
    for name in dict.fromkeys(name for row in rows for name in row):
        column = [row[name] for row in rows if name in row]
        yield f"  {name}: {column_text(column)}"


def _few(row: Mapping[str, object]) -> list[tuple[str, object]]:
    return list(row.items())[: 2 * FEW]


def column_text(column: Iterable[object]) -> str:
    """Numbers and texts of a column, each summarized."""
    values = list(column)
    numbers = [value for value in values if _is_number(value)]
    strings = [
        value if isinstance(value, str) else scalar_text(value)
        for value in values
        if not _is_number(value)
    ]
    parts = [array_text(numbers)] if numbers else []
    parts += [texts_text(strings)] if strings else []
    return "; ".join(parts)
