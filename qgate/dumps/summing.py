"""What there is in a dump, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from qgate.dumps.reading import Dump
from qgate.dumps.records import Record

_SUMS = ("records", "with_values", "with_counts", "with_nonfinite", "bytes", "stored_bytes")
BY = ("layer_type", "operation", "name", "quant_type", "rank", "iteration")


def nbytes(record: Record) -> int:
    """Of the tensor as it flowed; 0 where its dtype is not known here."""
    dtype = getattr(torch, record.dtype, None)
    return record.elements * dtype.itemsize if isinstance(dtype, torch.dtype) else 0


def totals(dump: Dump) -> dict[str, Any]:
    """Numbers of records and bytes, in all and by field; plain data."""
    groups: dict[str, dict[Any, list[int]]] = {name: defaultdict(lambda: [0, 0]) for name in BY}
    records = flowed = values = counted = nonfinite = 0
    stored: dict[tuple[int, str, str], int] = {}
    for record in dump.records():
        size = nbytes(record)
        records, flowed = records + 1, flowed + size
        counted += record.counts is not None
        nonfinite += any(record.nonfinite.values())
        if record.tensor is not None:
            values += 1
            stored[record.rank, record.tensor.file, record.tensor.key] = size
        for name, group in groups.items():
            told = group[getattr(record, name)]
            told[0], told[1] = told[0] + 1, told[1] + size
    return {
        "folder": str(dump.folder),
        "qgate": dump.about.made_qgate,
        "created": dump.about.created,
        "world_size": dump.world_size,
        "header": dump.header,
        "records": records,
        "with_values": values,
        "with_counts": counted,
        "with_nonfinite": nonfinite,
        "bytes": flowed,
        "stored_bytes": sum(stored.values()),
        "states": {state.rank: state.state for state in dump.states},
        "by": {
            name: {_told(key): {"records": n, "bytes": size} for key, (n, size) in _sorted(group)}
            for name, group in groups.items()
        },
        "notes": dump.notes(),
    }


def all_totals(dumps: Sequence[Dump]) -> dict[str, Any]:
    """The totals of one dump, or of several as if they were one; ranks of the same number count as
    one rank of each."""
    parts = [totals(dump) for dump in dumps]
    if len(parts) == 1:
        return parts[0]
    whole = dict(parts[0])
    whole["folder"] = ", ".join(part["folder"] for part in parts)
    for name in _SUMS:
        whole[name] = sum(part[name] for part in parts)
    whole["world_size"] = max(part["world_size"] for part in parts)
    whole["notes"] = [f"{part['folder']}: {note}" for part in parts for note in part["notes"]]
    whole["states"] = {
        f"{number}/{rank}": state
        for number, part in enumerate(parts)
        for rank, state in part["states"].items()
    }
    whole["by"] = {}
    for name in BY:
        group: dict[str, dict[str, int]] = {}
        for part in parts:
            for key, numbers in part["by"][name].items():
                told = group.setdefault(key, {"records": 0, "bytes": 0})
                for what in told:
                    told[what] += numbers[what]
        whole["by"][name] = group
    return whole


def _told(key: object) -> str:
    return "unknown" if key in (None, "") else str(key)


def _sorted(group: dict[Any, list[int]]) -> list[tuple[Any, list[int]]]:
    """By key, numbers as numbers, and what is not known first."""
    known = sorted(item for item in group.items() if item[0] is not None)
    return [*([(None, group[None])] if None in group else []), *known]
