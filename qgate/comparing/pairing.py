"""Pair the records of two dumps, and tell local differences from carried ones.

Records with the names of their modules are paired by them. megatron-tensor-saver has none, and its
linears of a layer share one name: there the tensors of an iteration, rank and direction are laid
side by side in their order, and gaps show by names and shapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

from qgate.dumps import Record

Origin = Literal["", "local", "carried", "enters", "unknown"]
RecordPair = tuple[Record, Record]
Key = tuple[object, ...]
PARAMETERS = ("weight", "bias")
_RUN = ("iteration", "sample", "micro_batch")


@dataclass
class Pairing:
    """Pairs in the order of execution, and records without a counterpart.

    ungrouped   number of records, last of `only_reference`, whose group the actual dump lacks
    """

    pairs: list[RecordPair] = field(default_factory=list)
    only_actual: list[Record] = field(default_factory=list)
    only_reference: list[Record] = field(default_factory=list)
    ungrouped: int = 0
    notes: list[str] = field(default_factory=list)
    by_module: bool = True


@dataclass(frozen=True)
class PairingRule:
    """Rule by which the records of two dumps are paired, made from all of them.

    by_module    all records have the names of their modules
    run_fields   fields of the run that both sides have
    """

    by_module: bool
    run_fields: tuple[str, ...]


def rule_of(actual: Iterable[Record], reference: Iterable[Record]) -> PairingRule:
    """Make the rule; a field that one side lacks, as older files the sample, does not count."""
    by_module = True
    shared = set(_RUN)
    for side in (actual, reference):
        named: set[str] = set()
        for record in side:
            by_module = by_module and bool(record.module)
            named.update(name for name in _RUN if getattr(record, name) is not None)
        shared &= named
    return PairingRule(by_module, tuple(name for name in _RUN if name in shared))


def pair_records(
    actual: Sequence[Record], reference: Sequence[Record], rule: PairingRule | None = None
) -> Pairing:
    """Pair records, of all ranks or of one with the `rule` of all of them."""
    rule = rule or rule_of(actual, reference)
    a, r = (sorted(side, key=lambda x: (x.rank, x.order)) for side in (actual, reference))
    pairing = _by_module(a, r) if rule.by_module else _by_order(a, r, rule.run_fields)
    pairing.pairs.sort(key=lambda pair: (pair[0].order, pair[0].rank))
    return pairing


def _name(record: Record) -> str:
    """Name a tensor; megatron-tensor-saver calls the context of attention its output."""
    names = record.layer_type, record.operation, record.name
    return "context" if names == ("attention", "forward", "output") else record.name


def _run_part(record: Record) -> Key:
    return record.rank, record.iteration, record.sample, record.micro_batch, record.operation


def _by_module(actual: Sequence[Record], reference: Sequence[Record]) -> Pairing:
    """Pair records by module and call; those that share even that, by their order."""
    sides: tuple[dict[Key, Record], dict[Key, Record]] = ({}, {})
    for side, records in zip(sides, (actual, reference), strict=True):
        times = Counter[Key]()
        for record in records:
            key = (*_run_part(record), record.module, record.phase, _name(record), record.call)
            side[*key, times[key]] = record
            times[key] += 1
    a, r = sides
    return Pairing(
        pairs=[(record, r[key]) for key, record in a.items() if key in r],
        only_actual=[record for key, record in a.items() if key not in r],
        only_reference=[record for key, record in r.items() if key not in a],
    )


def _by_order(
    actual: Sequence[Record], reference: Sequence[Record], run_fields: Sequence[str]
) -> Pairing:
    pairing = Pairing(by_module=False)
    groups: dict[Key, tuple[list[Record], list[Record]]] = {}
    for side, records in enumerate((actual, reference)):
        for record in records:
            key = (record.rank, record.operation, *(getattr(record, name) for name in run_fields))
            groups.setdefault(key, ([], []))[side].append(record)
    for a, r in groups.values():
        before = len(pairing.pairs)
        _side_by_side(a, r, pairing)
        pairing.ungrouped += 0 if a else len(r)
        count = len(pairing.pairs) - before
        if a and r and (len(a), len(r)) != (count, count):
            when = f", iteration {a[0].iteration}" if "iteration" in run_fields else ""
            pairing.notes.append(
                f"rank {a[0].rank}{when}, {a[0].operation}: {len(a)} tensors and {len(r)}, "
                f"{count} paired by their order, names and shapes"
            )
    return pairing


def _kind(record: Record) -> Key:
    return record.layer_type, record.layer, record.component, record.phase, _name(record)


def _side_by_side(a: Sequence[Record], r: Sequence[Record], pairing: Pairing) -> None:
    kinds = [_kind(record) for record in a], [_kind(record) for record in r]
    if kinds[0] == kinds[1]:
        pairing.pairs += zip(a, r, strict=True)
        return
    shaped = [
        [(kind, record.shape) for kind, record in zip(of, side, strict=True)]
        for of, side in zip(kinds, (a, r), strict=True)
    ]
    for change, a0, a1, r0, r1 in SequenceMatcher(None, shaped[0], shaped[1], False).get_opcodes():
        if change == "equal" or kinds[0][a0:a1] == kinds[1][r0:r1]:
            pairing.pairs += zip(a[a0:a1], r[r0:r1], strict=True)
        else:
            pairing.only_actual += a[a0:a1]
            pairing.only_reference += r[r0:r1]


# Where a difference comes from -----------------------------------------------------------------


def origins(pairing: Pairing, differs: Mapping[int, bool]) -> dict[int, Origin]:
    """Find the origins of differences, by the number of the pair; of one rank or of all of them.

    An output is local if its inputs are equal, and carried if one is not. A parameter differs by
    itself. An input that differs is carried if anything differed before, and else enters here.
    """
    origin_of: dict[int, Origin] = {}
    inputs = _inputs(pairing) if pairing.by_module else _inputs_by_order(pairing)
    for number, (record, _) in enumerate(pairing.pairs):
        if not differs.get(number):
            continue
        if record.phase == "pre":
            origin: Origin = "carried" if origin_of else "enters"
            origin_of[number] = "local" if record.name in PARAMETERS else origin
        elif not any(pairing.pairs[i][0].name not in PARAMETERS for i in inputs[number]):
            origin_of[number] = "unknown"
        elif any(differs.get(i) for i in inputs[number]):
            origin_of[number] = "carried"
        else:
            origin_of[number] = "local" if all(i in differs for i in inputs[number]) else "unknown"
    return origin_of


def _inputs(pairing: Pairing) -> dict[int, list[int]]:
    """Find the inputs of each output: the pairs that went into the same call of its module."""
    calls: dict[Key, list[int]] = defaultdict(list)
    outputs: dict[int, Key] = {}
    for number, (record, _) in enumerate(pairing.pairs):
        key = (*_run_part(record), record.module, record.call)
        if record.phase == "pre":
            calls[key].append(number)
        else:
            outputs[number] = key
    return {number: calls[key] for number, key in outputs.items()}


def _inputs_by_order(pairing: Pairing) -> dict[int, list[int]]:
    """Find the inputs of each output: one call of a layer ends before the next one begins."""
    open_calls: dict[Key, tuple[list[int], bool]] = {}
    inputs: dict[int, list[int]] = {}
    for number, (record, _) in enumerate(pairing.pairs):
        key = (*_run_part(record), record.layer_type, record.layer, record.component)
        call_inputs, ended = open_calls.get(key, ([], False))
        if record.phase == "pre":
            open_calls[key] = ([number] if ended else [*call_inputs, number], False)
        else:
            inputs[number] = call_inputs
            open_calls[key] = (call_inputs, True)
    return inputs
