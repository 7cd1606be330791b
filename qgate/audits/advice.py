"""Limits that accept what was compared and refuse the alternatives that a place accepts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from qgate._version import __version__
from qgate.audits.record import KIND, AuditRecord, LimitAdvice, PlaceRecord, is_weak, merge_places
from qgate.text.wording import brief

MARGIN = 4.0
"""A limit is at least this many times the largest distance seen."""


def advice_for(spot: PlaceRecord) -> LimitAdvice:
    """Return the first limit that refuses the most alternatives; without text if none does."""
    best: LimitAdvice = {"text": "", "refuses": []}
    for name, written in _WRITTEN.items():
        if name not in spot["differences"]:
            continue
        candidate = _limit(spot, name, written)
        if len(candidate["refuses"]) > len(best["refuses"]):
            best = candidate
    return best


def joined_record(parts: Sequence[AuditRecord], notes: list[str]) -> AuditRecord:
    """Return one record of all processes, with advice for weak places."""
    places = merge_places(spot for part in parts for spot in part["places"])
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part["errors"])
    for spot in places:
        spot["advice"] = advice_for(spot) if is_weak(spot) else None
    return {
        "kind": KIND, "qgate": __version__, "places": places, "errors": dict(errors),
        "notes": notes,
    }  # fmt: skip


def _limit(spot: PlaceRecord, name: str, written: Callable[[float], str]) -> LimitAdvice:
    """Return the limit on one distance, in the middle of what was seen and the nearest fault.

    Faults within the margin of what was seen cannot be refused, the others all are.
    """
    differences = spot["differences"][name]
    distances = {fault: values.get(name, 0.0) for fault, values in spot["smallest"].items()}
    refusable = {
        fault: size
        for fault, size in distances.items()
        if math.isfinite(size) and size > 1.5 * MARGIN * differences > 0
    }
    if not refusable:
        return {"text": "", "refuses": []}
    nearest = min(refusable.values())
    middle = max(math.sqrt(differences * nearest), 1.25 * MARGIN * differences)
    text = written(_rounded(middle))
    return {"text": text, "refuses": list(refusable)}


def _rounded(value: float) -> float:
    """Round down to one digit, to two where one digit loses more than a fifth."""
    step = 10.0 ** math.floor(math.log10(value))
    one_digit = math.floor(value / step) * step
    if one_digit >= 0.8 * value:
        return one_digit
    return math.floor(10 * value / step) * step / 10


def _cosine(distance: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(distance)))
    return f"cosine > {1 - distance:.{digits}f}"


_WRITTEN: dict[str, Callable[[float], str]] = {
    "cosine": _cosine,
    "calc_diff": lambda distance: f"calc_diff < {brief(distance)}",
    "sqnr": lambda distance: f"SQNR > {-10 * math.log10(distance):.0f} dB",
    "absolute": lambda distance: f"rtol=0, atol={brief(distance)}",
    "mixed": lambda distance: f"rtol={brief(distance)}, atol={brief(distance)}",
    "scaled": lambda distance: f"rtol=0, atol={brief(distance)} * expected.abs().max()",
}
"""Distances in the order of preference, and how a test writes a limit on each."""
