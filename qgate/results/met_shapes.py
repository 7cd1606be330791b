"""Shapes that the quantized modules of a mode met in a run, and what none of them met."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

from qgate.records import Meta
from qgate.results.pictures import Count
from qgate.text import counted, listed

MOST_NAMES = 100
_NAMES = 3


class MetShapes(TypedDict):
    """Shapes that some modules of a mode met, the same ones.

    modules   their names, of up to 100; count says how many they are
    tokens    numbers of tokens, or of positions of an image; of samples where there are no tokens
    samples   numbers of samples of a batch; empty without a batch axis
    unbatched true if one was left out
    strided   true if memory was not contiguous
    never     in words, what they never met
    """

    modules: Annotated[list[str], Meta(max_length=MOST_NAMES)]
    count: Count
    tokens: list[Count]
    samples: list[Count]
    unbatched: bool
    strided: bool
    never: list[str]


@dataclass
class ModuleShapes:
    """Shapes that one module met: each as samples (0 without that axis), tokens, is strided.

    channels   the axis of the channels, from the end
    """

    channels: int = -1
    met: set[tuple[int, int, bool]] = field(default_factory=set)

    def add(self, shape: Sequence[int], *, is_strided: bool) -> None:
        """Add the shape of an input."""
        if shape:
            axis = self.channels % len(shape) if len(shape) >= -self.channels else len(shape) - 1
            rows = [*shape[:axis], *shape[axis + 1 :]]
            samples = rows.pop(0) if len(shape) > 2 else 0
            self.met.add((samples, math.prod(rows), is_strided))

    def statement(self) -> tuple[Any, ...]:
        """Return tokens, samples, whether a batch axis was left out and memory strided."""
        return (
            tuple(sorted({tokens for _, tokens, _ in self.met})),
            tuple(sorted({samples for samples, _, _ in self.met} - {0})),
            any(not samples for samples, _, _ in self.met),
            any(is_strided for _, _, is_strided in self.met),
            self.channels == -1,
        )


def alike(shapes: Mapping[str, Sequence[Any]]) -> list[MetShapes]:
    """Put modules together that met the same; those that met least come first."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, statement in shapes.items():
        groups.setdefault(tuple(map(_frozen, statement)), []).append(name)
    listed_groups = [
        MetShapes(
            modules=names[:MOST_NAMES], count=len(names), tokens=[*tokens], samples=[*samples],
            unbatched=unbatched, strided=strided,
            never=_never(tokens, samples, unbatched, strided, is_linear),
        )
        for (tokens, samples, unbatched, strided, is_linear), names in groups.items()
    ]  # fmt: skip
    return sorted(listed_groups, key=lambda group: (-len(group["never"]), len(group["tokens"])))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _never(
    tokens: Sequence[int], samples: Sequence[int], unbatched: bool, strided: bool, is_linear: bool
) -> list[str]:
    beside = [
        ("other numbers of tokens", len(tokens) == 1),
        ("other numbers of samples", len(samples) < 2 and not (unbatched and len(tokens) > 1)),
        ("inputs without a batch axis", is_linear and not unbatched),
        ("strided memory", not strided),
    ]
    return [words for words, is_lacking in beside if is_lacking]


def shapes_text(group: MetShapes) -> str:
    """Write `1 to 1,029 tokens (14 numbers), batches of 1 to 64, without a batch axis`."""
    tokens = group["tokens"]
    count = f" ({len(tokens)} numbers)" * (len(tokens) > 1)
    parts = [f"{_range(tokens)} {'token' if tokens == [1] else 'tokens'}{count}"]
    if group["samples"]:
        parts.append(f"batches of {_range(group['samples'])}")
    parts += ["without a batch axis"] * group["unbatched"] + ["strided memory"] * group["strided"]
    return ", ".join(parts)


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))


def mode_shapes_texts(coverage: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write what the modules of each mode met, and what they never met."""
    texts: dict[str, list[str]] = {}
    for of in coverage:
        words = []
        for group in of.get("shapes") or []:
            never = f"; never {' or '.join(group['never'])}" if group["never"] else ""
            words.append(f"{counted(group['count'], 'module')} {shapes_text(group)}{never}")
        if words:
            texts.setdefault(". ".join(words), []).append(of["mode"])
    return [f"shapes met in {listed(modes, _NAMES)}: {text}" for text, modes in texts.items()]


def unmet_text(coverage: Iterable[Mapping[str, Any]]) -> str:
    """Name the modules that met one shape alone, that of the samples; empty for none."""
    names: dict[str, None] = {}
    for of in coverage:
        for group in of.get("shapes") or []:
            if {"other numbers of tokens", "other numbers of samples"} <= {*group["never"]}:
                names |= dict.fromkeys(group["modules"])
    if not names:
        return ""
    return f"one shape alone was met by {counted(len(names), 'module')}: {listed([*names], _NAMES)}"
