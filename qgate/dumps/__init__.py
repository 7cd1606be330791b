"""Tensors on disk: collected ones with an index, and what other programs wrote, none of it run."""

from qgate.dumps.exporting import Exported, export_dump
from qgate.dumps.following import Follower
from qgate.dumps.merging import MergedDump, merge_dumps
from qgate.dumps.reading import Dump, RankState
from qgate.dumps.records import Record, StoredValues
from qgate.dumps.selecting import FIELDS, Seen, check_fields, is_wanted
from qgate.dumps.summing import nbytes, totals
from qgate.dumps.tensor_files import StoredTensor, expand, floats_in, read_tensors
from qgate.dumps.verifying import problems, unnamed
from qgate.dumps.writing import DumpWriter

__all__ = [
    "FIELDS",
    "Dump",
    "DumpWriter",
    "Exported",
    "Follower",
    "MergedDump",
    "RankState",
    "Record",
    "Seen",
    "StoredTensor",
    "StoredValues",
    "check_fields",
    "expand",
    "export_dump",
    "floats_in",
    "is_wanted",
    "merge_dumps",
    "nbytes",
    "problems",
    "read_tensors",
    "totals",
    "unnamed",
]
