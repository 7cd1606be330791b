"""What a user allows a kernel to compute in: the arithmetic that it must follow, and roundings."""

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
    """What a user allows or asks for.

    known          the one arithmetic that a kernel must follow, if one was named
    intermediates  True if intermediate values may be rounded to 16 bits
    """

    known: KnownProduct | KnownAttention | None = None
    intermediates: bool = True

    @property
    def asks(self) -> bool:
        return self.known is not None

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
    known = PRODUCTS.get(arithmetic) or ATTENTIONS.get(arithmetic)
    if known is None:
        names = (*ARITHMETICS, *PRODUCTS, *ATTENTIONS)
        raise ValueError(str(unknown("arithmetic", arithmetic, names)))
    if isinstance(known, KnownAttention) and intermediates == FLOAT32:
        raise ValueError(
            f"arithmetic={arithmetic!r} rounds probabilities to 16 bits, which "
            "intermediates='float32' forbids; leave one of both out."
        )
    return FLOAT32, KernelRequest(known, intermediates == ROUNDED)
