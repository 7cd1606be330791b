"""The formats of IEEE P3109 up to eight bits, made by name: binary8p3se has precision 3."""

from __future__ import annotations

import re
from functools import cache

from qgate.errors import QgateError
from qgate.formats.floats import FloatFormat

ABOUT = (
    "binary{K}p{P}{s,u}{e,f} (IEEE P3109): K from 3 to 8 bits, precision P from 1 to K - 1 (s, "
    "signed) or to K (u, unsigned), with Inf (e, extended) or without (f, finite)"
)


PREFIX = "binary"
NAMES = [
    f"{PREFIX}{bits}p{precision}{sign}{domain}"
    for bits in range(3, 9)
    for sign in "su"
    for precision in range(1, bits + (sign == "u"))
    for domain in "ef"
]


@cache
def p3109_format(name: str) -> FloatFormat | None:
    """Return the format of a name such as binary8p3se; None for a name of another kind."""
    if not name.startswith(PREFIX):
        return None
    match = re.fullmatch(r"binary(\d+)p(\d+)([su])([ef])", name)
    bits, precision = (int(match[1]), int(match[2])) if match else (0, 0)
    signed = match is not None and match[3] == "s"
    if match is None or not (3 <= bits <= 8 and 1 <= precision <= bits - signed):
        raise QgateError(f"unknown format {name!r}. Formats of that family are {ABOUT}.")
    exponent_bits = bits - precision + (not signed)
    return FloatFormat(
        name,
        exponent_bits,
        precision - 1,
        "extended" if match[4] == "e" else "fnuz" if signed else "nan",
        bias=2 ** (exponent_bits - 1),
        signed=signed,
    )
