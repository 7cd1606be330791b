"""An update as plain data, to travel from the process that measured to the one that writes.

Texts, numbers, bytes, lists and dicts only: that is what reaches another process without pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from qgate.baselines.manifest import TensorRecord, read_reference, records_of, reference_bytes
from qgate.baselines.origin import Key, Origin, differences
from qgate.baselines.rows import BaselineRows
from qgate.baselines.update import Update
from qgate.errors import QgateError

Packed = dict[str, Any]


def pack(update: Update) -> Packed:
    """The update as plain data."""
    return {
        "origin": asdict(update.origin),
        "values": [
            [mode, list(key), value]
            for mode, held in update.values.items()
            for key, value in held.items()
        ],
        "drops": [[mode, list(key)] for mode, keys in update.drops.items() for key in sorted(keys)],
        "uncalibrated": sorted(update.uncalibrated),
        "references": [
            [basis, reference_bytes(tensors), _plain(records_of(tensors))]
            for basis, tensors in update.references.items()
        ],
    }


def unpack(packed: Packed) -> Update:
    """The update that was packed; its tensors are checked against their hashes."""
    update = Update(Origin(**packed["origin"]))
    for mode, key in packed["drops"]:
        update.drop(mode, Key(*key))
    for mode, key, value in packed["values"]:
        update.set_accepted(mode, Key(*key), value)
    for mode in packed["uncalibrated"]:
        update.without_calibration(mode)
    for basis, data, records in packed["references"]:
        held = {site: _record(each) for site, each in records}
        update.set_reference(basis, read_reference(data, held, f"the reference of basis {basis}"))
    return update


def joined(updates: Iterable[Update]) -> Update:
    """What several processes of one run want written, as one update."""
    first, *others = updates
    for other in others:
        apart = differences(first.origin, other.origin)
        if apart:
            raise QgateError(
                f"two things of one name, {first.origin.model}, were measured in one run: "
                f"{'; '.join(apart)}. Give them different names."
            )
        for mode, keys in other.drops.items():
            for key in keys - first.values.get(mode, {}).keys():
                first.drop(mode, key)
        for mode, values in other.values.items():
            for key, value in values.items():
                before = first.values.get(mode, {}).get(key, value)
                if before != value:
                    raise QgateError(
                        f"two tests measured different errors under one name, {key} of {mode}: "
                        f"{before:.4g} and {value:.4g}. Give their sites, or the files of their "
                        "suites, different names."
                    )
                first.set_accepted(mode, key, value)
        first.uncalibrated |= other.uncalibrated
        first.references |= other.references
    return first


def _plain(records: Mapping[str, TensorRecord]) -> list[list[Any]]:
    def drawn(rows: BaselineRows | None) -> list[int] | None:
        return None if rows is None else [rows.seed, rows.count, rows.of]

    return [[site, [list(r.shape), r.sha256, drawn(r.rows)]] for site, r in records.items()]


def _record(plain: list[Any]) -> TensorRecord:
    shape, sha256, rows = plain
    return TensorRecord(tuple(shape), sha256, None if rows is None else BaselineRows(*rows))
