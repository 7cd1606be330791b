"""Pictures from a results file, as they must be to be drawn: such a file may hold anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from qgate.results.pictures import (
    ErrorPicture,
    MagnitudePicture,
    Picture,
    SweepPicture,
    WorstChannel,
)

MOST_BINS, MOST_SIZE, MOST_LEVELS, MOST_OCTAVES, MOST_CHANNELS = 512, 128, 1000, 2200, 1000
LARGEST_COUNT, LARGEST = 1 << 63, 1e300
# asinh of the largest float is 710.
LARGEST_EDGE = 700.0


def checked(picture: object) -> Picture:
    """A picture of a known kind, or a ValueError that says what is wrong with it."""
    kind = _mapping(picture, "a picture").get("kind")
    check = _KINDS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise ValueError(f"unknown kind {str(kind)[:60]!r}; known: {', '.join(_KINDS)}")
    return cast(Picture, check(_mapping(picture, "a picture")))


def _errors(given: Mapping[str, Any]) -> ErrorPicture:
    bins, density, octaves = (
        _mapping(given.get(name), name) for name in ("bins", "density", "octaves")
    )
    made: ErrorPicture = {
        "kind": "errors",
        "elements": _count(given, "elements"),
        "sampled": _count(given, "sampled"),
        "rms": _number(given, "rms", 0.0),
        "bins": {
            "edge": _number(bins, "edge", 0.0),
            "counts": _counts(bins, "counts", MOST_BINS),
            "below": _count(bins, "below"),
            "above": _count(bins, "above"),
        },
        "density": {
            "size": _count(density, "size", 1, MOST_SIZE),
            "edge": _number(density, "edge", 0.0, LARGEST_EDGE),
            "cells": _counts(density, "cells", 3 * MOST_SIZE**2, least=0),
        },
        "octaves": {
            "low": _count(octaves, "low", -3000, 3000),
            "error": _shares(octaves, "error"),
            "energy": _shares(octaves, "energy"),
            "elements": _counts(octaves, "elements", MOST_OCTAVES),
        },
    }
    cells, size = made["density"]["cells"], made["density"]["size"]
    if len(cells) % 3 or any(place >= size for at in (0, 1) for place in cells[at::3]):
        raise ValueError("cells are not columns, rows and counts of a square of that size")
    rows = made["octaves"]
    if not len(rows["error"]) == len(rows["energy"]) == len(rows["elements"]):
        raise ValueError("octaves of different lengths")
    if given.get("channels") is not None:
        made["channels"] = [_channel(each) for each in _list(given, "channels", MOST_CHANNELS)]
        made["channel_count"] = _count(given, "channel_count")
    return made


def _channel(given: object) -> WorstChannel:
    channel = _mapping(given, "a channel")
    return {
        "index": _count(channel, "index"),
        "share": _number(channel, "share", 0.0, 1.001),
        "relative_mse": _maybe(channel, "relative_mse", 0.0),
    }


def _sweep(given: Mapping[str, Any]) -> SweepPicture:
    levels = []
    for level in _list(given, "levels", MOST_LEVELS):
        if not isinstance(level, list | tuple) or len(level) != 2:
            raise ValueError("a level is not an exponent and a relative MSE")
        pair = dict(zip(("exponent", "error"), level, strict=True))
        levels.append((_number(pair, "exponent", -1e4, 1e4), _number(pair, "error", 0.0)))
    if not levels:
        raise ValueError("no levels")
    return {
        "kind": "sweep",
        "format": _text(given, "format"),
        "levels": levels,
        "recommended": _number(given, "recommended", -1e4, 1e4),
        "accepted": _maybe(given, "accepted", -1e4, 1e4),
    }


def _magnitudes(given: Mapping[str, Any]) -> MagnitudePicture:
    return {
        "kind": "magnitudes",
        "format": _text(given, "format"),
        "low": _count(given, "low", -3000, 3000),
        "counts": _counts(given, "counts", MOST_OCTAVES),
        "zeros": _count(given, "zeros"),
        "nonfinite": _count(given, "nonfinite"),
        "largest": _maybe(given, "largest", -3000, 3000),
        "smallest": _maybe(given, "smallest", -3000, 3000),
        "saturated": _count(given, "saturated"),
        "flushed": _count(given, "flushed"),
    }


_KINDS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "errors": _errors,
    "sweep": _sweep,
    "magnitudes": _magnitudes,
}


# Pieces ----------------------------------------------------------------------------------------


def _mapping(given: object, name: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is no object")
    return given


def _list(given: Mapping[str, Any], name: str, most: int, least: int = 0) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list | tuple):
        raise ValueError(f"{name} is no list")
    if not least <= len(found) <= most:
        raise ValueError(f"{name} has {len(found)} entries, {least} to {most} can be drawn")
    return list(found)


def _text(given: Mapping[str, Any], name: str) -> str:
    found = given.get(name)
    if not isinstance(found, str):
        raise ValueError(f"{name} is no text")
    return found


def _number(
    given: Mapping[str, Any], name: str, least: float = -LARGEST, most: float = LARGEST
) -> float:
    found = given.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"{name} is no number")
    if not (least <= found <= most) or math.isnan(found):
        raise ValueError(f"{name} is out of range")
    return float(found)


def _maybe(
    given: Mapping[str, Any], name: str, least: float = -LARGEST, most: float = LARGEST
) -> float | None:
    return None if given.get(name) is None else _number(given, name, least, most)


def _count(given: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST_COUNT) -> int:
    found = given.get(name)
    if isinstance(found, bool) or not isinstance(found, int):
        raise ValueError(f"{name} is no whole number")
    if not least <= found <= most:
        raise ValueError(f"{name} is out of range")
    return found


def _counts(given: Mapping[str, Any], name: str, most: int, least: int = 1) -> list[int]:
    return [_count({name: each}, name) for each in _list(given, name, most, least)]


def _shares(given: Mapping[str, Any], name: str) -> list[float]:
    return [_number({name: each}, name, 0.0, 1.001) for each in _list(given, name, MOST_OCTAVES, 1)]
