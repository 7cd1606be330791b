"""Tensors on disk: collected ones with an index, and what other programs wrote, none of it run."""

from qgate.dumps.records import Place, Record
from qgate.dumps.tensor_files import StoredTensor, expand, read_tensors
from qgate.dumps.writing import DumpWriter

__all__ = [
    "DumpWriter",
    "Place",
    "Record",
    "StoredTensor",
    "expand",
    "read_tensors",
]
