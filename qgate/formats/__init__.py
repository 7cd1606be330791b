"""Number formats: their values, and tensors rounded to them.

`get(name)` returns a format with its facts; `quantize` and `encode` (also as `qgate.quantize`)
round tensors to its grid; `report` counts the effects. Looking up facts does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.exports import lazy
from qgate.formats import p3109
from qgate.formats._block import BlockFormat, Format, is_format
from qgate.formats._element import ElementFormat
from qgate.formats._literals import (
    DOUBLE_NAMES,
    FORMATS,
    FOUR_OVER_SIX_NAMES,
    RESIDUAL_NAMES,
    VECTOR_NAMES,
)
from qgate.formats.integers import IntFormat
from qgate.formats.options import ROUNDINGS

if TYPE_CHECKING:
    from qgate.formats.encoded import Encoded
    from qgate.formats.engine.effects import Effects, report
    from qgate.formats.philox import Philox, RandomWords
    from qgate.formats.quantizer import Quantizer, encode, observe, quantize
    from qgate.formats.state_draws import StatePhilox
    from qgate.formats.tile_draws import TransformerEnginePhilox

__all__ = [
    "FORMATS",
    "ROUNDINGS",
    "BlockFormat",
    "Effects",
    "ElementFormat",
    "Encoded",
    "Format",
    "IntFormat",
    "Philox",
    "Quantizer",
    "RandomWords",
    "StatePhilox",
    "TransformerEnginePhilox",
    "aliases",
    "encode",
    "get",
    "is_format",
    "names",
    "observe",
    "quantize",
    "report",
    "unlisted_names",
]


def get(name: str) -> Format:
    """Return the format of a name or alias, in upper or lower case."""
    return FORMATS.get(name)


def names() -> list[str]:
    """List the names of all formats, element formats first."""
    return FORMATS.names()


def unlisted_names() -> list[str]:
    """List names of formats outside of `names`: P3109's, GGUF's IQ types, variants of others."""
    return [*p3109.NAMES, *FOUR_OVER_SIX_NAMES, *DOUBLE_NAMES, *RESIDUAL_NAMES, *VECTOR_NAMES]


def aliases(name: str) -> list[str]:
    """List other names of the same format."""
    return FORMATS.aliases(get(name).name)


__getattr__ = lazy(
    __name__,
    {
        "engine.effects": "Effects report",
        "encoded": "Encoded",
        "philox": "Philox RandomWords",
        "quantizer": "Quantizer encode observe quantize",
        "state_draws": "StatePhilox",
        "tile_draws": "TransformerEnginePhilox",
    },
)
