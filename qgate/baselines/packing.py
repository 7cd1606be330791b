"""Updates as plain data, to travel from the process that measured to the one that writes.

Texts, numbers, bytes, lists and dicts reach another process without pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple
from typing import Any

from qgate.baselines.manifest import TensorRecord, read_reference, records_of, reference_bytes
from qgate.baselines.origin import Key, Origin, differences
from qgate.baselines.rows import BaselineRows
from qgate.baselines.update import Update
from qgate.errors import QgateError

Packed = dict[str, Any]


def pack(update: Update) -> Packed:
    """Write an update as plain data."""
    return {
        "origin": asdict(update.origin),
        "values": [
            [mode, list(key), value]
            for mode, values in update.values.items()
            for key, value in values.items()
        ],
        "drops": [[mode, list(key)] for mode, keys in update.drops.items() for key in sorted(keys)],
        "uncalibrated": sorted(update.uncalibrated),
        "references": [
            [basis, reference_bytes(tensors), _plain(records_of(tensors))]
            for basis, tensors in update.references.items()
        ],
    }


def unpack(packed: Packed) -> Update:
    """Read an update that was packed; its tensors are checked against their hashes."""
    update = Update(Origin(**packed["origin"]))
    for mode, key in packed["drops"]:
        update.drop(mode, Key(*key))
    for mode, key, value in packed["values"]:
        update.set_accepted(mode, Key(*key), value)
    for mode in packed["uncalibrated"]:
        update.without_calibration(mode)
    for basis, data, records in packed["references"]:
        by_site = {
            site: TensorRecord(tuple(shape), sha256, None if rows is None else BaselineRows(*rows))
            for site, (shape, sha256, rows) in records
        }
        tensors = read_reference(data, by_site, f"the reference of basis {basis}")
        update.set_reference(basis, tensors)
    return update


def joined(updates: Iterable[Update]) -> Update:
    """Join what several processes of one run want written into one update."""
    first, *more = updates
    for other in more:
        if reasons := differences(first.origin, other.origin):
            raise QgateError(
                f"two things of one name, {first.origin.model}, were measured in one run: "
                f"{'; '.join(reasons)}. Give them different names."
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
    return [
        [site, [list(of.shape), of.sha256, None if of.rows is None else list(astuple(of.rows))]]
        for site, of in records.items()
    ]
