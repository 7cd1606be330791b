"""Rounding to the formats of qgate that the audit plants, loaded only where values need one."""

from __future__ import annotations

import functools

from qgate import formats
from qgate.audits.reading import Values
from qgate.formats import definition
from qgate.formats.settings import QuantizerSettings


def quantized(x: Values, fmt: str) -> Values:
    """Round values to a format, with the scales that fit them."""
    return definition.quantize(x, _settings(fmt))


@functools.cache
def _settings(fmt: str) -> QuantizerSettings:
    fitted = {} if formats.get(fmt).kind == "block" else {"granularity": "tensor"}
    return QuantizerSettings(formats.get(fmt), fitted)
