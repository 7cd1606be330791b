"""Lines about the places of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from qgate.audits.record import AuditRecord, PlaceRecord, is_weak
from qgate.text.escaping import one_line
from qgate.text.wording import counted, listed

NAMES = {
    "zeros": "zeros",
    "constant": "a constant",
    "shuffle": "a shuffle",
    "larger": "+10 %",
    "noise": "5 % noise",
    "row": "a row of zeros",
    "scale": "a scale off by two",
    "element": "one element in a thousand wrong",
    "coarser": "a coarser format",
}
"""Alternatives as lines name them, in the order in which they are tried and listed."""

CHECK = "qgate.testing.check_kernel"


def summary_lines(record: AuditRecord) -> Iterator[str]:
    """Yield the first line of the summary, then one line for each weak place."""
    places = record["places"]
    weak = [spot for spot in places if is_weak(spot)]
    judged = [spot for spot in places if spot["judged"]]
    calls = sum(spot["calls"] for spot in places)
    if not calls:
        yield "no comparison of tensors passed in a test, so the audit has nothing to say"
    else:
        verb = "accepts" if len(weak) == 1 else "accept"
        yield (
            f"{counted(calls, 'comparison')} at {counted(len(places), 'place')}, "
            f"{len(judged)} of them judged: {counted(len(weak), 'place')} {verb} wrong values"
        )
    yield from (place_line(spot) for spot in weak)
    reasons: Counter[str] = Counter()
    for spot in places:
        reasons.update(spot["left_out"])
    if reasons:
        parts = [
            f"{counted(count, 'comparison')} of {why}" for why, count in sorted(reasons.items())
        ]
        yield f"left out: {listed(parts, 8)}"
    yield from record["notes"]
    errors = record["errors"]
    if errors:
        first = [one_line(f"{text} ({count}x)") for text, count in sorted(errors.items())]
        total = counted(sum(errors.values()), "error")
        yield f"{total} inside the audit; the tests are not affected: {listed(first, 3)}"


def place_line(spot: PlaceRecord) -> str:
    """Write a weak place: where, the limit, what passes, and a limit that refuses it."""
    limit = spot["limits"][0] if spot["limits"] else ""
    more = " and other limits" if len(spot["limits"]) > 1 else ""
    through = f" (through {spot['through']})" if spot["through"] else ""
    return one_line(
        f"{spot['file']}:{spot['line']}{through}: {spot['function']}, {limit}{more}, accepts "
        f"{accepted_names(spot, spot['accepts'])}; {advice_text(spot)}"
    )


def accepted_names(spot: PlaceRecord, faults: Iterable[str]) -> str:
    """List alternatives; the coarser format by its name."""
    chosen = set(faults)
    names = [name for fault, name in NAMES.items() if fault in chosen and fault != "coarser"]
    if "coarser" in chosen:
        formats = "/".join(spot["coarser"])
        names.append(f"{formats} precision" if formats else NAMES["coarser"])
    return ", ".join(names)


def advice_text(spot: PlaceRecord) -> str:
    """Say which limit would refuse the alternatives, or why none does."""
    advice = spot["advice"]
    if advice is None or not advice["text"]:
        return f"no limit tells them from the difference seen: {CHECK} does"
    missed = [fault for fault in spot["accepts"] if fault not in advice["refuses"]]
    if not missed:
        return f"{advice['text']} would not"
    names = accepted_names(spot, missed)
    return (
        f"{advice['text']} would accept only {names}, which no limit tells from the difference "
        f"seen: {CHECK} does"
    )
