"""Samples of token ids from a data source, for statistics of a model's activations.

`read_samples(DataRequest(...), tokenizer)` reads the built-in text, a known data set, a file, a
folder or rows of token ids. No padding is ever in a sample, no code of a data set ever runs, and
no random state but an own one is drawn from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.models.samples.reading import Samples, check_ids, read_samples
    from qgate.models.samples.request import FORMATS, SOURCES, ByteTokenizer, DataRequest, Tokenizer

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

__getattr__ = lazy(
    __name__,
    {
        "request": "FORMATS SOURCES ByteTokenizer DataRequest Tokenizer",
        "reading": "Samples check_ids read_samples",
    },
)
