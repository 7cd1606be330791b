"""Accepted errors of several kinds of devices: whose values a run takes.

A mode has one file for the device that recorded it first, and one more for each other kind of
device whose values differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qgate.baselines.accepted import Accepted
from qgate.baselines.origin import Key

Files = Mapping[str, Accepted]
"""Accepted errors of a mode by the kind of device that their file is of, empty for the first."""


def values_for(sources: Iterable[Accepted]) -> dict[Key, tuple[float | str, str]]:
    """Return accepted errors and the device that each is of; earlier sources win."""
    values: dict[Key, tuple[float | str, str]] = {}
    for accepted in sources:
        for key, value in accepted.values.items():
            values.setdefault(key, (value, accepted.device))
    return values
