"""Wrong alternatives of a tensor: what a broken kernel, layout or scale could have returned.

A fault of a whole tensor changes every element. A fault of a part changes one typical row, block or
element, and leaves the others as they were.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qgate.audits.reading import Values
from qgate.causes.faults import Fault

_TABLE = 1 << 16
_LEAST_CHANGE = 0.01
"""Change of a shuffled or averaged tensor, relative to its RMS, below which it is no fault."""
_LEAST_SHARE = 0.1
"""Share of elements that a coarser format must change."""


@dataclass(frozen=True)
class ValueFault(Fault[Callable[[Values], Values | None]]):
    """A wrong alternative of values in a part; `change` makes none where nothing would change."""

    part: Literal["tensor", "row", "block", "elements"] = "tensor"


def _in_coarser_format(x: Values) -> Values | None:
    fmt = coarser_format(x)
    if not fmt:
        return None
    y = _COARSER[fmt][1](x)
    return y if np.mean(y != x) >= _LEAST_SHARE else None


def coarser_format(x: Values) -> str:
    """Name the next coarser format of values by the bits that they need; empty if none is left."""
    bits = significant_bits(x)
    return next((name for name, (least, _) in _COARSER.items() if bits > least), "")


def significant_bits(x: Values) -> int:
    """Return how many significant bits write every value exactly."""
    mantissas = x.view(np.int64)[x != 0] & ((1 << 52) - 1)
    used = int(np.bitwise_or.reduce(mantissas, initial=0))
    trailing = (used & -used).bit_length() - 1 if used else 52
    return 53 - trailing


def _with_bits(x: Values, bits: int) -> Values:
    """Round to numbers with `bits` significant bits, ties to even, on the bits of float64."""
    dropped = 53 - bits
    codes = x.view(np.int64)
    odd = (codes >> dropped) & 1
    rounded = codes + (odd + ((1 << (dropped - 1)) - 1))
    return (rounded & -(1 << dropped)).view(np.float64)


def _quantized(x: Values, fmt: str) -> Values:
    """Round to a format of qgate, which loads all of them: few tests compare such values."""
    return np.asarray(importlib.import_module("qgate.audits.rounding").quantized(x, fmt))


_COARSER: dict[str, tuple[int, Callable[[Values], Values]]] = {
    "float32": (24, lambda x: _with_bits(x, 24)),
    "bfloat16": (8, lambda x: _with_bits(x, 8)),
    "fp8_e4m3": (4, lambda x: _quantized(x, "fp8_e4m3")),
    "mxfp4": (2, lambda x: _quantized(x, "mxfp4")),
}
"""The next coarser format of values that need more bits than these, the first that fits; and what
rounds to it."""


@functools.cache
def _signs() -> Values:
    return np.random.default_rng(0).choice((-1.0, 1.0), _TABLE)


@functools.lru_cache(maxsize=8)
def _permutation(size: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).permutation(size)


def _if_changed(y: Values, x: Values) -> Values | None:
    change = np.square(y - x).mean()
    return y if change >= _LEAST_CHANGE**2 * np.square(x).mean() else None


FAULTS = {
    fault.words: fault
    for fault in (
        ValueFault("zeros", np.zeros_like),
        ValueFault("constant", lambda x: _if_changed(np.full_like(x, x.mean()), x)),
        ValueFault("shuffle", lambda x: _if_changed(x[_permutation(x.size)], x)),
        ValueFault("larger", lambda x: x * 1.1),
        ValueFault("noise", lambda x: x * (1 + 0.05 * np.resize(_signs(), x.size))),
        ValueFault("row", np.zeros_like, "row"),
        ValueFault("scale", lambda x: x * 2, "block"),
        ValueFault("element", lambda x: -x, "elements"),
        ValueFault("coarser", _in_coarser_format),
    )
}
