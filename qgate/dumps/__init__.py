"""Tensors on disk: collected ones with an index, and files of other programs; no code is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.dumps.choosing import nbytes, totals
    from qgate.dumps.exporting import ExportReport, export_dump
    from qgate.dumps.following import Follower
    from qgate.dumps.merging import MergedDump, merge_dumps
    from qgate.dumps.reading import Dump, RankState
    from qgate.dumps.record import FIELDS, Record, RecordSelection, StoredValues
    from qgate.dumps.tensor_files import StoredTensor, expand, floats_in, read_tensors
    from qgate.dumps.verifying import problems, unnamed
    from qgate.dumps.writing import DumpWriter

__all__ = [
    "FIELDS",
    "Dump",
    "DumpWriter",
    "ExportReport",
    "Follower",
    "MergedDump",
    "RankState",
    "Record",
    "RecordSelection",
    "StoredTensor",
    "StoredValues",
    "expand",
    "export_dump",
    "floats_in",
    "merge_dumps",
    "nbytes",
    "problems",
    "read_tensors",
    "totals",
    "unnamed",
]

__getattr__ = lazy(
    __name__,
    {
        "choosing": "nbytes totals",
        "exporting": "ExportReport export_dump",
        "following": "Follower",
        "merging": "MergedDump merge_dumps",
        "reading": "Dump RankState",
        "record": "FIELDS Record RecordSelection StoredValues",
        "tensor_files": "StoredTensor expand floats_in read_tensors",
        "verifying": "problems unnamed",
        "writing": "DumpWriter",
    },
)
