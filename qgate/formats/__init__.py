"""Number formats: what they can represent, and tensors on their grids.

`get(name)` gives a format with its facts; `quantize` and `encode` (also as `qgate.quantize`) put
tensors on its grid; `report` counts what that does to them. Looking up facts does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qgate.formats._block import BlockFormat, Format, is_format
from qgate.formats._element import ElementFormat
from qgate.formats._literals import FORMATS
from qgate.formats.integers import IntFormat
from qgate.formats.options import ROUNDINGS

if TYPE_CHECKING:
    from qgate.formats.encoded import Encoded
    from qgate.formats.engine.census import Effects, report
    from qgate.formats.quantizer import Quantizer, encode, observe, quantize

__all__ = [
    "FORMATS",
    "ROUNDINGS",
    "BlockFormat",
    "Effects",
    "ElementFormat",
    "Encoded",
    "Format",
    "IntFormat",
    "Quantizer",
    "aliases",
    "encode",
    "get",
    "is_format",
    "names",
    "observe",
    "quantize",
    "report",
]

_HOME = {
    "Effects": "engine.census",
    "Encoded": "encoded",
    "Quantizer": "quantizer",
    "encode": "quantizer",
    "observe": "quantizer",
    "quantize": "quantizer",
    "report": "engine.census",
}


def get(name: str) -> Format:
    """The format of that name or alias, in upper or lower case."""
    return FORMATS.get(name)


def names() -> list[str]:
    """The names of all formats, element formats first."""
    return FORMATS.names()


def aliases(name: str) -> list[str]:
    """Other names that mean the same format."""
    return FORMATS.aliases(get(name).name)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"qgate.formats.{_HOME[name]}"), name)
    raise AttributeError(f"module 'qgate.formats' has no attribute {name!r}")
