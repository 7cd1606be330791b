"""Tensors on disk: reading what other programs wrote, without running any of it."""

from qgate.dumps.tensor_files import StoredTensor, expand, read_tensors

__all__ = ["StoredTensor", "expand", "read_tensors"]
