"""Which records of two dumps belong together, and whether a difference arose where it is seen.

Records with the names of their modules are paired by them. The known collector has none, and its
linears of a layer share one name: there the tensors of an iteration, rank and direction are laid
side by side in their order, and gaps show by names and shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

from qgate.dumps import Record

Origin = Literal["", "local", "carried", "enters", "unknown"]
Twin = tuple[Record, Record]
PARAMETERS = ("weight", "bias")
_RUN = ("iteration", "sample", "micro_batch")


@dataclass
class Pairing:
    """Pairs in the order of execution, and what has no counterpart.

    apart   of the last so many of the reference alone, the other knows nothing of their group
    """

    pairs: list[Twin] = field(default_factory=list)
    only_actual: list[Record] = field(default_factory=list)
    only_reference: list[Record] = field(default_factory=list)
    apart: int = 0
    notes: list[str] = field(default_factory=list)
    by_module: bool = True


@dataclass(frozen=True)
class PairingRule:
    """How the records of two dumps find each other: what all of them say decides for each.

    by_module   all have the names of their modules
    known       what both sides know of the run that a record is of
    """

    by_module: bool
    known: tuple[str, ...]


def rule_of(actual: Iterable[Record], reference: Iterable[Record]) -> PairingRule:
    """What one side does not know of its run, as an older file its sample, keeps nothing apart."""
    by_module = True
    known = set(_RUN)
    for side in (actual, reference):
        told: set[str] = set()
        for record in side:
            by_module = by_module and bool(record.module)
            told.update(name for name in _RUN if getattr(record, name) is not None)
        known &= told
    return PairingRule(by_module, tuple(name for name in _RUN if name in known))


def paired(
    actual: Sequence[Record], reference: Sequence[Record], rule: PairingRule | None = None
) -> Pairing:
    """Records of one rank may be paired by themselves, with the `rule` of all of them."""
    rule = rule or rule_of(actual, reference)
    a, r = actual, reference
    found = _by_module(a, r) if rule.by_module else _by_order(a, r, rule.known)
    found.by_module = rule.by_module
    found.pairs.sort(key=lambda pair: (pair[0].order, pair[0].rank))
    return found


def _name(record: Record) -> str:
    """The known collector calls the context of attention its output."""
    context = (record.layer_type, record.operation, record.name) == (
        "attention",
        "forward",
        "output",
    )
    return "context" if context else record.name


def _run_part(record: Record) -> tuple[object, ...]:
    return record.rank, record.iteration, record.sample, record.micro_batch, record.operation


def _by_module(actual: Sequence[Record], reference: Sequence[Record]) -> Pairing:
    found = Pairing()
    sides = [_keyed(actual), _keyed(reference)]
    for key, record in sides[0].items():
        other = sides[1].pop(key, None)
        if other is None:
            found.only_actual.append(record)
        else:
            found.pairs.append((record, other))
    found.only_reference = list(sides[1].values())
    return found


def _keyed(records: Sequence[Record]) -> dict[tuple[object, ...], Record]:
    """By module and call; records that share even that are told apart by their order."""
    keyed: dict[tuple[object, ...], Record] = {}
    times: dict[tuple[object, ...], int] = defaultdict(int)
    for record in sorted(records, key=lambda each: (each.rank, each.order)):
        key = (*_run_part(record), record.module, record.phase, _name(record), record.call)
        keyed[*key, times[key]] = record
        times[key] += 1
    return keyed


def _by_order(
    actual: Sequence[Record], reference: Sequence[Record], known: Sequence[str]
) -> Pairing:
    found = Pairing()
    sides = (_grouped(actual, known), _grouped(reference, known))
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        a, r = (side.get(key, []) for side in sides)
        before = len(found.pairs)
        _side_by_side(a, r, found)
        found.apart += 0 if a else len(r)
        if a and r and (len(a), len(r)) != (len(found.pairs) - before,) * 2:
            when = f", iteration {a[0].iteration}" if "iteration" in known else ""
            found.notes.append(
                f"rank {a[0].rank}{when}, {a[0].operation}: {len(a)} tensors and {len(r)}, "
                f"{len(found.pairs) - before} paired by their order, names and shapes"
            )
    return found


def _grouped(
    records: Sequence[Record], known: Sequence[str]
) -> dict[tuple[object, ...], list[Record]]:
    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda each: (each.rank, each.order)):
        run_part = (record.rank, record.operation, *(getattr(record, name) for name in known))
        groups[run_part].append(record)
    return groups


def _kind(record: Record) -> tuple[object, ...]:
    return record.layer_type, record.layer, record.component, record.phase, _name(record)


def _side_by_side(a: Sequence[Record], r: Sequence[Record], found: Pairing) -> None:
    kinds = ([_kind(each) for each in a], [_kind(each) for each in r])
    if kinds[0] == kinds[1]:
        found.pairs += zip(a, r, strict=True)
        return
    shaped = ([(_kind(each), each.shape) for each in a], [(_kind(each), each.shape) for each in r])
    for what, a0, a1, r0, r1 in SequenceMatcher(None, *shaped, autojunk=False).get_opcodes():
        if what == "equal" or kinds[0][a0:a1] == kinds[1][r0:r1]:
            found.pairs += zip(a[a0:a1], r[r0:r1], strict=True)
        else:
            found.only_actual += a[a0:a1]
            found.only_reference += r[r0:r1]


# Where a difference comes from -----------------------------------------------------------------


def origins(pairing: Pairing, differs: Mapping[int, bool]) -> dict[int, Origin]:
    """Of each pair that differs, by its place among the pairs; of one rank or of all of them.

    An output is local if its inputs are equal, and carried if one is not. A parameter differs by
    itself. An input that differs is carried if anything differed before, and else enters here.
    """
    found: dict[int, Origin] = {}
    inputs = _inputs(pairing)
    anything = False
    for place, (record, _) in enumerate(pairing.pairs):
        if not differs.get(place):
            continue
        if record.phase == "pre":
            found[place] = "carried" if anything else "enters"
            if record.name in PARAMETERS:
                found[place] = "local"
        elif not any(pairing.pairs[i][0].name not in PARAMETERS for i in inputs[place]):
            found[place] = "unknown"
        elif any(differs.get(i) for i in inputs[place]):
            found[place] = "carried"
        else:
            found[place] = "local" if all(i in differs for i in inputs[place]) else "unknown"
        anything = True
    return found


def _inputs(pairing: Pairing) -> dict[int, list[int]]:
    """Per pair behind a module, the pairs that went into that call of it."""
    if not pairing.by_module:
        return _inputs_by_order(pairing)
    calls: dict[tuple[object, ...], list[int]] = defaultdict(list)
    after: dict[int, tuple[object, ...]] = {}
    for place, (record, _) in enumerate(pairing.pairs):
        key = (*_run_part(record), record.module, record.call)
        if record.phase == "pre":
            calls[key].append(place)
        else:
            after[place] = key
    return {place: calls[key] for place, key in after.items()}


def _inputs_by_order(pairing: Pairing) -> dict[int, list[int]]:
    """What was collected just before it of the same layer: one call ends before the next begins."""
    open_calls: dict[tuple[object, ...], tuple[list[int], bool]] = {}
    found: dict[int, list[int]] = {}
    for place, (record, _) in enumerate(pairing.pairs):
        key = (*_run_part(record), record.layer_type, record.layer, record.component)
        going_in, ended = open_calls.get(key, ([], False))
        if record.phase == "pre":
            open_calls[key] = ([place] if ended else [*going_in, place], False)
        else:
            found[place] = going_in
            open_calls[key] = (going_in, True)
    return found
