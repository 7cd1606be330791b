"""Panels of the pictures in a record; a new kind of picture is a new entry here.

A results file may hold anything, so a picture is checked before it is drawn: its types, and bounds
of what can be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from qgate.charts.scale_curves import ScaleCurve, scale_curve, scale_finding
from qgate.page.plots import errors
from qgate.page.plots.long_texts import (
    divergence_along,
    divergence_finding,
    loss_along,
    loss_finding,
)
from qgate.page.plots.magnitudes import magnitude_histogram, magnitudes_finding
from qgate.records import validate
from qgate.results.pictures import (
    ErrorPicture,
    LongTextPicture,
    MagnitudePicture,
    SweepPicture,
)
from qgate.text import one_line

# So many pictures of one record are drawn; a record that has more was not written by qgate.
MOST = 12
Draw = tuple[str, Callable[[Any], str], Callable[[Any], str]]
_MOST_SIZE, _LARGEST, _SHARE, _EXPONENT = 128, 1e300, (0.0, 1.001), (-1e4, 1e4)
_OCTAVE = (-3000, 3000)


def sweep_curve(picture: SweepPicture) -> str:
    """Draw relative MSE over the scale exponent, exact levels in a row at the bottom."""
    return scale_curve(_curve(picture))


def sweep_finding(picture: SweepPicture) -> str:
    """Say what the recommended scale saves beside the accepted one."""
    return scale_finding(_curve(picture))


def _curve(picture: SweepPicture) -> ScaleCurve:
    return ScaleCurve(
        picture["format"], picture["levels"], picture["recommended"], picture["accepted"]
    )


@dataclass(frozen=True)
class Panel:
    """A plot, the finding that is its title, and its name."""

    title: str
    svg: str
    kind: str


@dataclass(frozen=True)
class PictureKind:
    """A kind of picture: its type, its panels, and bounds of its numbers and lengths by path.

    panels  what it is called, what draws it, what says its finding
    """

    record: type
    panels: tuple[Draw, ...]
    numbers: Mapping[str, tuple[float, float]]
    lengths: Mapping[str, tuple[int, int]]


PICTURE_KINDS = {
    "errors": PictureKind(
        ErrorPicture,
        (
            ("error_histogram", errors.error_histogram, errors.histogram_finding),
            ("density", errors.density, errors.density_finding),
            ("worst_channels", errors.worst_channels, errors.channels_finding),
            ("error_by_magnitude", errors.error_by_magnitude, errors.magnitude_finding),
        ),
        {
            "rms": (0, _LARGEST),
            "bins.edge": (0, _LARGEST),
            "density.size": (1, _MOST_SIZE),
            # asinh of the largest float is 710.
            "density.edge": (0, 700),
            "octaves.low": _OCTAVE,
            "octaves.error": _SHARE,
            "octaves.energy": _SHARE,
            "channels.share": _SHARE,
            "channels.relative_mse": (0, _LARGEST),
        },
        {
            "bins.counts": (1, 512),
            "density.cells": (0, 3 * _MOST_SIZE**2),
            "octaves.error": (1, 2200),
            "octaves.energy": (1, 2200),
            "octaves.elements": (1, 2200),
            "channels": (0, 1000),
        },
    ),
    "sweep": PictureKind(
        SweepPicture,
        (("sweep", sweep_curve, sweep_finding),),
        {
            "levels.0": _EXPONENT,
            "levels.1": (0, _LARGEST),
            "recommended": _EXPONENT,
            "accepted": _EXPONENT,
        },
        {"levels": (1, 1000)},
    ),
    "magnitudes": PictureKind(
        MagnitudePicture,
        (("magnitudes", magnitude_histogram, magnitudes_finding),),
        {"low": _OCTAVE, "largest": _OCTAVE, "smallest": _OCTAVE},
        {"counts": (1, 2200)},
    ),
    "long_text": PictureKind(
        LongTextPicture,
        (
            ("divergence_along", divergence_along, divergence_finding),
            ("loss_along", loss_along, loss_finding),
        ),
        dict.fromkeys(("kl", "bits", "reference", "half_95"), (-_LARGEST, _LARGEST)),
        dict.fromkeys(("kl", "bits", "reference", "half_95"), (1, 1000)),
    ),
}
# Panels that there is nothing to draw for: a record without channels, a reference of zeros.
NOTHING_TO_DRAW: dict[str, Callable[[Any], bool]] = {
    "worst_channels": lambda picture: not picture.get("channels"),
    "density": lambda picture: not picture["density"]["cells"],
}


def panels_of(record: Mapping[str, Any]) -> tuple[list[Panel], list[str]]:
    """Draw the panels of a record, and say why others cannot be drawn; never raises."""
    carried = record.get("pictures")
    if carried is None:
        return [], []
    if isinstance(carried, bytes):
        carried = msgspec.json.decode(carried)  # as `qgate.page.runs` keeps them
    if not isinstance(carried, list | tuple):
        return [], ["the pictures of this record are no list"]
    panels: list[Panel] = []
    problems = [f"{len(carried) - MOST} more pictures are not drawn"] * (len(carried) > MOST)
    for number, picture in enumerate(carried[:MOST], start=1):
        try:
            panels += _panels(picture)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as reason:
            problems.append(one_line(f"picture {number} cannot be drawn: {reason}"))
    return panels, problems


def _panels(picture: Any) -> Iterable[Panel]:
    if not isinstance(picture, Mapping):
        raise ValueError("a picture is no object")
    kind = (
        PICTURE_KINDS.get(picture.get("kind", "")) if isinstance(picture.get("kind"), str) else None
    )
    if kind is None:
        name = str(picture.get("kind"))[:60]
        raise ValueError(f"unknown kind {name!r}; known: {', '.join(PICTURE_KINDS)}")
    _check(picture, kind)
    return [
        Panel(finding(picture), draw(picture), name)
        for name, draw, finding in kind.panels
        if not (name in NOTHING_TO_DRAW and NOTHING_TO_DRAW[name](picture))
    ]


def _check(picture: Mapping[str, Any], kind: PictureKind) -> None:
    validate(picture, kind.record)
    for path, (least, most) in kind.lengths.items():
        for rows in _at(picture, path.split(".")):
            if not least <= len(rows) <= most:
                raise ValueError(f"{path} has {len(rows)} entries, {least} to {most} can be drawn")
    for path, (low, high) in kind.numbers.items():
        for rows in _at(picture, path.split(".")):
            values = rows if isinstance(rows, list | tuple) else [rows]
            if not all(low <= value <= high for value in values):
                raise ValueError(f"{path} is out of range")
    if kind.record is LongTextPicture:
        lines = {len(picture[name]) for name in ("kl", "bits", "reference", "half_95")}
        if len(lines) > 1:
            raise ValueError("lines of different lengths")
    if kind.record is ErrorPicture:
        cells, size = picture["density"]["cells"], picture["density"]["size"]
        if len(cells) % 3 or any(path >= size for at in (0, 1) for path in cells[at::3]):
            raise ValueError("cells are not columns, rows and counts of a square of that size")
        if len({len(picture["octaves"][name]) for name in ("error", "energy", "elements")}) > 1:
            raise ValueError("octaves of different lengths")


def _at(value: Any, steps: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path, in each element of lists on the way; none if left out."""
    if value is None:
        return
    if not steps:
        yield value
    elif isinstance(value, Mapping):
        yield from _at(value.get(steps[0]), steps[1:])
    else:
        for item in value:
            yield from _at(
                item[int(steps[0])] if steps[0].isdigit() else item.get(steps[0]), steps[1:]
            )
