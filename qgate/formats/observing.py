"""A way to look at every tensor that is quantized, without touching it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from qgate.formats.engine import quantizing
from qgate.formats.quantizer import Quantizer


@contextlib.contextmanager
def observe(observer: Callable[[Tensor, Quantizer], None]) -> Iterator[None]:
    """Calls `observer(x, quantizer)` before each quantization inside."""
    quantizing.observers.append(observer)
    try:
        yield
    finally:
        quantizing.observers.remove(observer)
