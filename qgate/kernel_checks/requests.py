"""The arithmetic that a user holds a kernel at, and the roundings that are allowed."""

from __future__ import annotations

from dataclasses import dataclass

from qgate.arithmetics.known import ATTENTIONS, PRODUCTS, KnownAttention, KnownProduct
from qgate.errors import unknown
from qgate.expected.noise import ARITHMETICS

ROUNDED, FLOAT32 = "rounded", "float32"
INTERMEDIATES = (ROUNDED, FLOAT32)
"""Intermediate values may be rounded to 16 bits, or must not be."""


@dataclass(frozen=True)
class KernelRequest:
    """The arithmetic that a kernel must follow, and the roundings that it may make.

    arithmetic     the one arithmetic that a kernel must follow, if one was named
    intermediates  True if intermediate values may be rounded to 16 bits
    """

    arithmetic: KnownProduct | KnownAttention | None = None
    intermediates: bool = True

    @property
    def asks(self) -> bool:
        return self.arithmetic is not None

    @property
    def restricts(self) -> bool:
        """True if a kernel may fail that is right under another request."""
        return self.asks or not self.intermediates


def request_of(arithmetic: str, intermediates: str) -> tuple[str, KernelRequest]:
    """Return what sums are computed in at least, and what else was asked for."""
    if intermediates not in INTERMEDIATES:
        raise ValueError(str(unknown("intermediates", intermediates, INTERMEDIATES)))
    if arithmetic in ARITHMETICS:
        return arithmetic, KernelRequest(intermediates=intermediates == ROUNDED)
    entry = PRODUCTS.get(arithmetic) or ATTENTIONS.get(arithmetic)
    if entry is None:
        names = (*ARITHMETICS, *PRODUCTS, *ATTENTIONS)
        raise ValueError(str(unknown("arithmetic", arithmetic, names)))
    rounded = "probabilities" if isinstance(entry, KnownAttention) else "parts of sums"
    if intermediates == FLOAT32 and (isinstance(entry, KnownAttention) or entry.rounds_parts):
        raise ValueError(
            f"arithmetic={arithmetic!r} rounds {rounded} to 16 bits, which intermediates='float32' "
            "forbids; leave one of both out."
        )
    return FLOAT32, KernelRequest(entry, intermediates == ROUNDED)
