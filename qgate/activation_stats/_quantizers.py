"""Quantizers of formats by name, and the names that tables use.

A mode such as `int8` scales each row by itself. A table over whole tensors does not, so it says so.
"""

from __future__ import annotations

from qgate.activation_stats.record import PER_TENSOR
from qgate.formats import get
from qgate.formats.quantizer import Quantizer
from qgate.summaries.outcomes import Target, target_of


def _scaled_by_rows(fmt: Target) -> bool:
    """Tell if the modes of a format have a scale per token and output channel.

    Blocks have scales of their own, and formats of a wide range are cast as they are.
    """
    return fmt.kind == "element" and fmt.bits < 16 and not fmt.tapered


def quantizer_of(name: str) -> Quantizer:
    """Return the quantizer of rows that the modes of a format use."""
    fmt = get(name)
    return Quantizer(fmt, granularity="channel", axis=0) if _scaled_by_rows(fmt) else Quantizer(fmt)


def table_name(name: str) -> str:
    """Return the name of a format in tables over whole tensors, where it has one scale."""
    target = target_of(name)
    return f"{target.name}{PER_TENSOR}" if _scaled_by_rows(target) else target.name
