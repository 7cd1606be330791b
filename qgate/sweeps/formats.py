"""Formats that a sweep can scale, and what stands for them: elements, MX formats, or themselves."""

from __future__ import annotations

import itertools
from typing import Any

from qgate.errors import QgateError, unknown
from qgate.formats import FORMATS, BlockFormat, ElementFormat, Format, is_format
from qgate.formats.mx import MxFormat, mx_format
from qgate.formats.p3109 import PREFIX


def sweepable(format: Any, *, block: bool = False) -> Format:
    """Return a format by name or itself; the error of a wrong name lists what can be swept."""
    if isinstance(format, str):
        try:
            return FORMATS.get(format)
        except QgateError:
            if format.strip().lower().startswith(PREFIX):
                raise  # the family says which names it has
            is_allowed = has_mx if block else _is_swept
            names = [fmt.name for fmt in FORMATS if is_allowed(fmt)]
            also = itertools.chain.from_iterable(map(FORMATS.aliases, names))
            raise unknown("format", format, names, also) from None
    if not is_format(format):
        raise TypeError(f"a format is a name or a qgate format, not {type(format).__name__}.")
    return format


def _is_swept(fmt: Format) -> bool:
    return _mx_of(fmt) is not None if fmt.kind == "block" else fmt.signed


def element_of(format: str | Format) -> ElementFormat:
    """Return the element format that a tensor sweep scales."""
    fmt = sweepable(format)
    if _is_swept(fmt):
        return fmt.element
    if fmt.kind == "element":
        raise QgateError(
            f"{fmt.name} has no negative values and cannot be swept: a sweep counts magnitudes. "
            "Sweep the signed format of that width."
        )
    name = next((f", {f.name}" for f in FORMATS if f == fmt.element), "")
    raise QgateError(
        f"{fmt.name} chooses its own scales, so there is none to sweep; sweep its elements{name}, "
        "or leave --elem-format out to see it beside other formats."
    )


def mx_of(format: str | Format) -> MxFormat:
    """Return the MX format that a format means in a block sweep."""
    fmt = sweepable(format, block=True)
    mx = _mx_of(fmt)
    if mx is None:
        names = ", ".join(fmt.name for fmt in FORMATS if mx_format(fmt))
        raise QgateError(
            f"{fmt.name} has no MX format, so no block sweep; those that have: {names}."
        )
    return mx


def has_mx(format: str | Format) -> bool:
    """Tell if a format stands for an MX format in a block sweep."""
    return _mx_of(sweepable(format)) is not None


def _mx_of(fmt: Format) -> MxFormat | None:
    if fmt.kind == "block":
        mx = mx_format(fmt)
        return mx if mx is not None and mx.default_rule == "floor" else None
    candidates = filter(None, map(mx_format, FORMATS))
    return next(
        (m for m in candidates if m.element == fmt or (fmt.name, m.name) == ("int8", "mxint8")),
        None,
    )


def with_shares(format: str | Format) -> BlockFormat | None:
    """Return a format whose blocks' scales can be any number, as codebooks' are; else None."""
    fmt = sweepable(format)
    return fmt if fmt.kind == "block" and fmt.with_share(1.0) is not None else None
