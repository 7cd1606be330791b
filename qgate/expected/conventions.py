"""The ways in which correct quantizers of one format differ, each written out.

A format fixes which values there are; two correct kernels may still make their scales
differently: int8 from amax/127 or amax/127.5, fp8 with any scale or with a power of two, MX by one
of four rules.
Each convention is a function from source values to quantized values in float64, like
`formats.definition`, which is the first convention of every quantizer.

Formats that choose between two grids, and the orders of float32 operations in which kernels make
the scales of NVFP4, have their conventions at the end.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qgate.expected.group_scales import (
    HALVES,
    PLUS,
    STORED,
    TIMES,
    as_stored,
    by_groups,
    float32,
    group_scales,
    rounded_to,
)
from qgate.formats import get
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.definition import (
    codes_above_zero,
    round_by_list,
    scales_and_zero_points,
)
from qgate.formats.definition import quantize as define
from qgate.formats.nvfp4 import nvfp4_format
from qgate.formats.options import SCALE_RULES, Floats, Rounding
from qgate.formats.settings import QuantizerSettings

Values = Callable[[Floats, float], Floats]
NUDGE = 2.0**-21
"""How far a ratio of a value and its scale may be off in float32: three operations of 2^-24."""
MSE = "mse"
"""Scales that a search found: no exact form, only an error to be near."""
_WORDS = {"even": "ties to even", "away": "ties away from zero"}

NVFP4_SCALES = (
    "block scale amax*(s/6)",
    "block scale amax/6*s",
    "block scale amax/6/(1/s)",
    "block scale amax/6/(largest/2688)",
)
NVFP4_ELEMENTS = (
    "elements times the reciprocal",
    "elements divided by the scale",
    "elements times a quotient of scales",
)


@dataclass(frozen=True)
class Convention:
    """One correct way to quantize; `values(x, nudge)` multiplies the ratios to scales by `nudge`.

    Values at both nudges around 1 are the codes that float noise may choose from: they differ only
    where a source lies within noise of a rounding boundary.
    """

    name: str
    values: Values
    is_exact: bool = False
    """True if ratios to scales are exact in float32, as with powers of two."""
    scales: Callable[[Floats], Floats] | None = None
    """Gives the scale of each element, where elements are codes times scales."""
    is_last_bit: bool = False
    """True if another convention differs in the last bit of scales alone."""
    overflow: str = ""
    """What becomes of numbers beyond the largest, where conventions differ in it."""

    def __call__(self, x: Floats) -> Floats:
        return self.values(x, 1.0)

    @property
    def with_overflow(self) -> str:
        """The name, and what becomes of numbers beyond the largest."""
        is_told = not self.overflow or self.overflow in self.name
        return self.name if is_told else f"{self.name}, {self.overflow}"

    def alternatives(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the values with every ratio slightly smaller, and slightly larger."""
        if self.is_exact:
            return (values := self(x)), values
        return self.values(x, 1 - NUDGE), self.values(x, 1 + NUDGE)


def conventions(
    q: QuantizerSettings, dtype: str = "float32", *, orders: bool = False
) -> list[Convention]:
    """List the definition and every other convention of a quantizer; `dtype` is the source's.

    Options that were given explicitly (a scale, a scale rule, a rounding) are not varied. With
    `orders` each order of operations that gives other codes at ties of rounding is one of its own.
    """
    definition = definition_of(q)
    if orders and _is_scaled_element(q) and q.rotation is None:
        exact = _scaled(q, q.format.max, "float32")
        definition = Convention(definition.name, exact, scales=definition.scales)
    return [definition, *_others(q, dtype, orders)]


def definition_of(q: QuantizerSettings) -> Convention:
    """Return the definition of the format as a convention."""
    if q.rotation is not None:
        return _defined("the definition", q)
    if q.zero_point is not None:
        return Convention("scales and zero points from both ends", _zero_pointed(q))
    if _is_scaled_element(q):
        scales = _scales(q, q.format.max, "float32")
        values = _scaled(q, q.format.max, "float32", order="float32")
        words = overflow_words(q) if q.scale is not None else ""
        return Convention(_scale_name(q), values, scales=scales, overflow=words)
    if nvfp4_format(q.format) is not None:
        return Convention("scales in TransformerEngine's order", nvfp4_values(q, 0, 0))
    if isinstance(q.format, ChoosingFormat) and not q.format.by_rows:
        return Convention("the definition", choosing(q, q.format))
    name = f"scale rule {q.scale_rule}" if "scale_rule" in q.format.options else "the definition"
    words = overflow_words(q) if q.granularity is None else ""
    return replace(_defined(name, q), overflow=words)


def _defined(name: str, q: QuantizerSettings) -> Convention:
    return Convention(name, lambda x, _nudge: define(x, q), is_exact=True)


def _others(q: QuantizerSettings, dtype: str, orders: bool) -> Iterator[Convention]:
    if q.rotation is not None:
        return
    roundings: list[Rounding] = [q.rounding] if "rounding" in q.options else ["even", "away"]
    roundings = roundings if q.rounding in ("even", "away") else [q.rounding]
    if _is_scaled_element(q):
        if q.scale is None:
            yield from _element_conventions(q, roundings, dtype, orders)
        elif "saturate" not in q.options:
            yield from _overflowing(q, definition_of(q))
        return
    if "scale_rule" in q.format.options:
        rules = [q.scale_rule] if "scale_rule" in q.options else list(SCALE_RULES)
        for rule, rounding in itertools.product(rules, roundings):
            if (rule, rounding) != (q.scale_rule, q.rounding):
                name = f"scale rule {rule}, {_WORDS.get(rounding, rounding)}"
                yield _defined(name, with_options(q, scale_rule=rule, rounding=rounding))
        return
    if nvfp4_format(q.format) is not None:
        counts = (
            range(len(NVFP4_SCALES) - (not orders)),
            range(len(NVFP4_ELEMENTS) - (not orders)),
        )
        for scales, elements in itertools.product(*counts):
            if scales or elements:
                yield Convention(
                    f"{NVFP4_SCALES[scales]}, {NVFP4_ELEMENTS[elements]}",
                    nvfp4_values(q, scales, elements),
                )
        return
    if isinstance(q.format, ChoosingFormat) and not q.format.by_rows:
        for words, fmt in other_choices(q.format):
            yield Convention(words, choosing(q, fmt))
    for rounding in (q.rounding, *roundings):
        changed = with_options(q, rounding=rounding)
        if rounding != q.rounding:
            yield _defined(_WORDS[rounding], changed)
        if q.granularity is None and "saturate" not in q.options:
            words = "the definition" if rounding == q.rounding else _WORDS[rounding]
            yield from _overflowing(changed, _defined(words, changed))


def with_options(q: QuantizerSettings, **options: Any) -> QuantizerSettings:
    """Return a copy of settled options with some of them changed."""
    changed = copy.copy(q)
    for name, value in options.items():
        setattr(changed, name, value)
    return changed


# Element formats with scales ---------------------------------------------------------------------


def _zero_pointed(q: QuantizerSettings) -> Values:
    """Quantize by groups with ratios that are rounded to float32, as those of kernels are."""

    def values(x: Floats, nudge: float) -> Floats:
        def rows(groups: Floats) -> Floats:
            fitted = scales_and_zero_points(groups, q)
            scales, zero_points = (figures[:, None] for figures in fitted)
            with np.errstate(all="ignore"):
                ratios = (groups / scales).astype(np.float32).astype(np.float64) * nudge
                return codes_above_zero(ratios, zero_points, q) * scales

        return by_groups(x, q, rows)

    return values


def _is_scaled_element(q: QuantizerSettings) -> bool:
    if q.zero_point is not None:
        return False
    return q.format.kind == "element" and not q.format.tapered and q.granularity is not None


def overflow_words(q: QuantizerSettings) -> str:
    """Say what becomes of numbers beyond the largest; empty for formats that have one way."""
    if q.format.kind != "element" or q.format.nan_code is None or not math.isfinite(q.format.max):
        return ""
    return f"overflow to {q.format.max:g}" if q.saturate else f"overflow to {_beyond(q)}"


def _beyond(q: QuantizerSettings) -> str:
    return "Inf" if q.format.kind == "element" and q.format.has_inf else "NaN"


def _overflowing(q: QuantizerSettings, saturating: Convention) -> Iterator[Convention]:
    """List casts by a fixed scale that do not saturate, as those of torch on CUDA, or not Inf."""
    assert q.format.kind == "element"
    if q.format.nan_code is None:
        return
    changed = with_options(q, saturate=False)
    plain = _defined("", changed).values
    values = plain if q.granularity is None else _scaled(changed, q.format.max, "float32")
    words = overflow_words(changed)
    yield replace(saturating, name=f"{saturating.name}, {words}", values=values, overflow=words)
    words = f"{overflow_words(q)}, but Inf to {_beyond(q)}"

    def infinite(x: Floats, nudge: float) -> Floats:
        return np.where(np.isinf(x), values(x, nudge), saturating.values(x, nudge))

    yield replace(saturating, name=f"{saturating.name}, {words}", values=infinite, overflow=words)


def _element_conventions(
    q: QuantizerSettings, roundings: list[Rounding], dtype: str, orders: bool
) -> Iterator[Convention]:
    divisors = [(q.format.max, q.narrow)]
    if "narrow" in q.format.options and q.format.element.signed:
        half = 2.0 ** (q.format.bits - 1)
        divisors += [(half - 0.5, False), (half, False)]
    for (divisor, narrow), kind, rounding in itertools.product(
        divisors, _scale_kinds(q, dtype, orders), roundings
    ):
        own = divisor == q.format.max
        if kind not in ("float32", dtype, "power of two", PLUS) and rounding != "even":
            continue
        if kind in (TIMES, PLUS) and not own:
            continue
        changed = with_options(q, rounding=rounding, narrow=narrow)
        name = _kind_name(divisor, kind)
        name += "" if rounding == "even" else f", {_WORDS.get(rounding, rounding)}"
        is_definition = own and rounding == "even" and kind == "float32"
        listed = list(_in_any_order(name, changed, divisor, kind, dtype, is_definition))
        if not orders:  # but at ties of rounding that are the largest number itself
            both = divisor % 1 and kind == "float32" and rounding == "even"
            listed = listed[int(is_definition) : 2 if both else 1]
        yield from listed


def _scale_kinds(q: QuantizerSettings, dtype: str, orders: bool) -> list[str]:
    """List how a scale may be stored, and when it is rounded to that.

    Checkpoints of float32 weights store scales in 16 bits; codes follow either these or the scale
    in float32.
    """
    halves = list(HALVES) if dtype == "float32" else [dtype]
    stored = [STORED + half for half in HALVES]
    further = [*([TIMES] if orders else []), *([PLUS] if q.groups is not None else [])]
    return ["float32", *halves, "power of two", *stored, *further]


def _kind_name(divisor: float, kind: str) -> str:
    if kind == TIMES:
        return f"scale amax*(1/{divisor:g})"
    name = f"scale amax/{divisor:g}"
    if kind.startswith(STORED):
        return f"{name}, {kind} after the codes were made"
    return name + {"float32": "", "power of two": " up to a power of two", PLUS: f" {PLUS}"}.get(
        kind, f" in {kind}"
    )


def _in_any_order(
    name: str, q: QuantizerSettings, divisor: float, kind: str, dtype: str, is_definition: bool
) -> Iterator[Convention]:
    """List the orders in which ratios to a scale are computed: they differ at ties of rounding."""
    scales = _scales(q, divisor, kind)
    orders = ["float32"]
    if q.rounding == "even" and kind in ("float32", dtype, TIMES):
        orders += ["reciprocal"]
        orders += ["product"] if kind in ("float32", TIMES) else []
        orders += ["factor"] if divisor == q.format.max and "product" in orders else []
        orders += [dtype, f"{dtype} reciprocal"] if dtype in HALVES and kind != TIMES else []
    for order in orders:
        # The definition itself, whose ratios are not rounded, stands before all of them.
        plain = "" if order == "float32" and not is_definition else f", ratios in {order}"
        words = name + _ORDERS.get(order, plain)
        words = words.replace(f"{dtype} reciprocal", f"{dtype}, multiplied by the reciprocal")
        values = _scaled(q, divisor, kind, order=order)
        yield Convention(words, values, scales=scales, is_last_bit=kind == TIMES)


_ORDERS = {
    "reciprocal": ", multiplied by the reciprocal",
    "product": ", multiplied by the ratio of the largest numbers",
    "factor": ", multiplied by the reciprocal of the largest and that of the format",
}


def _scale_name(q: QuantizerSettings) -> str:
    return f"scale amax/{q.format.max:g}" if q.scale is None else "the scale given"


def _scaled(q: QuantizerSettings, divisor: float, kind: str, *, order: str = "") -> Values:
    """Quantize by groups with scales of amax/divisor, stored as `kind`.

    order  "": values are divided by the scale; "reciprocal": multiplied by its reciprocal;
           "product": by divisor/amax; "factor": by 1/amax times divisor, which is what torch makes
           of divisor / amax; a dtype: divided, and the ratio rounded to it; a dtype and
           "reciprocal": multiplied by a reciprocal in it, and rounded to it

    Ratios are rounded to float32, as those of kernels are, but for the definition's.
    """

    def values(x: Floats, nudge: float) -> Floats:
        def rows(groups: Floats) -> Floats:
            scales = group_scales(groups, q, divisor, kind)[:, None]
            with np.errstate(all="ignore"):
                half = HALVES.get(order.removesuffix(" reciprocal"))
                if order == "reciprocal":
                    quotients = groups * float32(1 / scales)
                elif half and order not in HALVES:
                    quotients = groups * rounded_to(half, 1 / scales)
                elif order in ("product", "factor"):
                    amax = np.abs(groups).max(axis=1, initial=0.0)[:, None]
                    amax = np.where(amax == 0, 1.0, amax)
                    factors = divisor / amax if order == "product" else float32(1 / amax) * divisor
                    quotients = groups * float32(factors)
                else:
                    quotients = groups / scales
                ratios = (float32(quotients) if order else quotients) * nudge
                if half:
                    ratios = rounded_to(half, ratios)
            assert q.format.kind == "element"
            codes = round_by_list(
                ratios, q.format, rounding=q.rounding, saturate=q.saturate, narrow=q.narrow
            )
            return np.asarray(codes * as_stored(scales, kind))

        return by_groups(x, q, rows)

    return values


def _scales(q: QuantizerSettings, divisor: float, kind: str) -> Callable[[Floats], Floats]:
    """Return a function that gives the scale of each element."""

    def rows(groups: Floats) -> Floats:
        scales = as_stored(group_scales(groups, q, divisor, kind), kind)
        return np.broadcast_to(scales[:, None], groups.shape)

    return lambda x: np.array(by_groups(x, q, rows))


# Any quantizer ------------------------------------------------------------------------------------


def tiles(fmt: str, rows: int, columns: int, divisor: float | None = None) -> Convention:
    """Return the convention of one float32 scale for each tile of the last two dimensions."""
    q = QuantizerSettings(get(fmt), {"granularity": "block", "block": (rows, columns)})
    name = f"{fmt} per tile of {rows}x{columns}"
    scales = _scales(q, divisor or q.format.max, "float32")
    return Convention(
        name, _scaled(q, divisor or q.format.max, "float32", order="float32"), scales=scales
    )


def other_choices(fmt: ChoosingFormat) -> Iterator[tuple[str, ChoosingFormat]]:
    """List the ways in which implementations of a format choose, in words, but for its own."""
    sums = {"mae": "sums of absolute errors", "mse": "sums of squared errors"}
    largest = (448.0, 256.0) if not fmt.signed else (fmt.largest_scale,)
    for error, at_most in itertools.product(sums, largest):
        if (error, at_most) != (fmt.error, fmt.largest_scale):
            words = f"blocks chosen by {sums[error]}"
            words += f", largest scale {at_most:g}" if len(largest) > 1 else ""
            yield words, replace(fmt, error=error, largest_scale=at_most)  # type: ignore[arg-type]


def choosing(q: QuantizerSettings, fmt: ChoosingFormat) -> Callable[[Floats, float], Floats]:
    """Quantize blocks to the better grid; a nudge decides between errors that nearly agree."""

    def values(x: Floats, nudge: float) -> Floats:
        state, favor = fmt.define_state(x), 1 + 2**4 * (nudge - 1)
        return by_groups(x, q, lambda rows: fmt.define(rows, q, state, False, favor))

    return values


def nvfp4_values(
    q: QuantizerSettings, scales: int, elements: int
) -> Callable[[Floats, float], Floats]:
    """Quantize to NVFP4 with one of several orders of float32 operations for each scale."""

    def values(x: Floats, nudge: float) -> Floats:
        fmt = nvfp4_format(q.format)
        assert fmt is not None
        state, top = fmt.define_state(x), np.float32(fmt.max)
        encode, fp32 = np.float32(state), np.float32
        decode = fp32(1) / encode
        if scales == 3:
            largest = np.abs(np.nan_to_num(x, posinf=0.0, neginf=0.0)).max(initial=0.0)
            decode = fp32(largest) / fp32(fmt.bound) if largest else decode

        def rows(blocks: Floats) -> Floats:
            with np.errstate(all="ignore"):
                amax = np.abs(blocks).max(axis=1).astype(fp32)
                block_scales = (
                    amax * (encode * (fp32(1) / top)),
                    amax / top * encode,
                    amax / top / decode,
                    amax / top / decode,
                )[scales]
                scale = fmt.define_scale(block_scales * fp32(nudge))
                if elements == 1:
                    ratios = blocks / (scale * decode).astype(np.float64)[:, None]
                else:
                    quotient = fp32(1) / decode / scale if elements else fp32(1) / (scale * decode)
                    factor = np.minimum(quotient, np.finfo(fp32).max)
                    ratios = (blocks * factor.astype(np.float64)[:, None]).astype(fp32)
                ratios = np.nan_to_num(ratios.astype(np.float64), posinf=fmt.max, neginf=-fmt.max)
                codes = round_by_list(ratios * nudge, fmt.element, rounding=q.rounding)
                result = codes * scale.astype(np.float64)[:, None] * float(decode)
                poisoned = blocks if q.inf == "nan" else np.where(np.isnan(blocks), np.nan, 0.0)
                is_whole = np.isfinite(poisoned).all(axis=1, keepdims=True)
                return np.where(is_whole, result, np.nan)

        return by_groups(x, q, rows)

    return values
