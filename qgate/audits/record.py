"""The record of an audit: the comparisons of a run by place, and what each place accepts.

It is plain data, so that a worker of pytest-xdist can send it, and records of workers merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

VERSION = 1


class LimitAdvice(TypedDict):
    """A limit that accepts what was compared and refuses alternatives.

    text      the limit as a test writes it, the empty text if there is none
    refuses   alternatives that it refuses, of those that the place accepts
    """

    text: str
    refuses: list[str]


class PlaceRecord(TypedDict):
    """A line of a test and the comparisons that it made.

    file      path below pytest's root
    line      line of the test's call
    through   file and line of the helper that compared, or the empty text
    function  the function that compared
    limits    the limits in use, the first few of them
    test      the first test that compared here
    calls     comparisons that passed here
    judged    those on which alternatives were tried
    accepts   alternatives that passed in each judged comparison where they change something
    refuses   alternatives that failed in at least one of them
    coarser   formats of the alternative `coarser`
    left_out  reason → comparisons that were not judged
    differences  name of a distance → the largest between the tensors compared
    smallest  accepted alternative → the smallest distances that it made
    advice    a limit that would refuse them; none if the place is not weak
    """

    file: str
    line: int
    through: str
    function: str
    limits: list[str]
    test: str
    calls: int
    judged: int
    accepts: list[str]
    refuses: list[str]
    coarser: list[str]
    left_out: dict[str, int]
    differences: dict[str, float]
    smallest: dict[str, dict[str, float]]
    advice: LimitAdvice | None


class AuditRecord(TypedDict):
    """The record of one run.

    kind     qgate.audit and the version of this record
    qgate    the version of qgate
    places   places by file and line
    errors   exceptions inside the audit, by their text, and how often each happened
    notes    what the run could not see, such as a worker that died
    """

    kind: str
    qgate: str
    places: list[PlaceRecord]
    errors: dict[str, int]
    notes: list[str]


KIND = f"qgate.audit/{VERSION}"
MOST_LIMITS = 3


def new_place(file: str, line: int, through: str, function: str, test: str) -> PlaceRecord:
    return {
        "file": file, "line": line, "through": through, "function": function, "limits": [],
        "test": test, "calls": 0, "judged": 0, "accepts": [], "refuses": [], "coarser": [],
        "left_out": {}, "differences": {}, "smallest": {}, "advice": None,
    }  # fmt: skip


def is_weak(spot: PlaceRecord) -> bool:
    return bool(spot["accepts"])


def add_judgment(
    spot: PlaceRecord,
    accepted: dict[str, dict[str, float]],
    refused: Iterable[str],
    differences: dict[str, float],
    coarser: Iterable[str] = (),
) -> None:
    """Add the outcome of comparisons: an alternative that failed once is not accepted here."""
    for name in refused:
        if name not in spot["refuses"]:
            spot["refuses"].append(name)
    for name, distances in accepted.items():
        smallest = spot["smallest"].setdefault(name, dict(distances))
        smallest |= {key: min(value, smallest.get(key, value)) for key, value in distances.items()}
    for name in spot["refuses"]:
        spot["smallest"].pop(name, None)
    for key, value in differences.items():
        spot["differences"][key] = max(value, spot["differences"].get(key, value))
    spot["coarser"] += [name for name in coarser if name and name not in spot["coarser"]]
    spot["accepts"] = list(spot["smallest"])


def merge_places(records: Iterable[PlaceRecord]) -> list[PlaceRecord]:
    """Add up the records of workers by place, and sort them by file and line."""
    merged: dict[tuple[str, int, str, str], PlaceRecord] = {}
    for record in records:
        key = (record["file"], record["line"], record["through"], record["function"])
        spot = merged.setdefault(key, new_place(*key, record["test"]))
        spot["test"] = min(spot["test"], record["test"])
        spot["calls"] += record["calls"]
        spot["judged"] += record["judged"]
        for limit in record["limits"]:
            add_limit(spot, limit)
        for reason, count in record["left_out"].items():
            spot["left_out"][reason] = spot["left_out"].get(reason, 0) + count
        add_judgment(
            spot, record["smallest"], record["refuses"], record["differences"], record["coarser"]
        )
    return [merged[key] for key in sorted(merged)]


def add_limit(spot: PlaceRecord, limit: str) -> None:
    """Note a limit that a place uses, unless it is listed or there are many."""
    if limit not in spot["limits"] and len(spot["limits"]) < MOST_LIMITS:
        spot["limits"].append(limit)
