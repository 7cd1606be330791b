"""From a data source to samples of token ids, for statistics of a model's activations.

`read_samples(DataRequest(...), tokenizer)` reads the built-in text, a known data set, a file, a
folder or rows of token ids. No padding is ever in a sample, no code of a data set ever runs, and
no random state but an own one is drawn from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qgate.models.samples.reading import Samples, check_ids, read_samples
    from qgate.models.samples.request import FORMATS, SOURCES, DataRequest
    from qgate.models.samples.tokenizing import ByteTokenizer, Tokenizer

__all__ = [
    "FORMATS",
    "SOURCES",
    "ByteTokenizer",
    "DataRequest",
    "Samples",
    "Tokenizer",
    "check_ids",
    "read_samples",
]

_HOME = {
    "FORMATS": "request",
    "SOURCES": "request",
    "ByteTokenizer": "tokenizing",
    "DataRequest": "request",
    "Samples": "reading",
    "Tokenizer": "tokenizing",
    "check_ids": "reading",
    "read_samples": "reading",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"qgate.models.samples.{_HOME[name]}"), name)
    raise AttributeError(f"module 'qgate.models.samples' has no attribute {name!r}")
