"""Accepted errors of several kinds of devices: whose values a run takes.

A mode has one file for the device that recorded it first, and one more for each other kind of
device whose values differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qgate.baselines.accepted import Accepted
from qgate.baselines.origin import MIXED, Key, Origin, kind_of

Files = Mapping[str, Accepted]
"""Accepted errors of a mode by the kind of device that their file is of, empty for the first."""


def is_same_kind(first: Accepted, now: Origin, recorded: Origin | None) -> bool:
    """Tell if the first file of a mode is of the kind of device of a run.

    An earlier qgate wrote `mixed`; then the device of the baseline counts.
    """
    device = first.device
    if device == MIXED:
        device = now.device if recorded is None else recorded.device
    return kind_of(device) == kind_of(now.device)


def values_for(sources: Iterable[Accepted]) -> dict[Key, tuple[float | str, str]]:
    """Return accepted errors and the device that each is of; earlier sources win."""
    values: dict[Key, tuple[float | str, str]] = {}
    for accepted in sources:
        for key, value in accepted.values.items():
            values.setdefault(key, (value, accepted.device))
    return values
