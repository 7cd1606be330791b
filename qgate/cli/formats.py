"""List the number formats, or show one: its facts, its values, a plot.

qgate formats                           all formats in one table
qgate formats hif8                      facts and the value of every code
qgate formats mxfp4 --plot mxfp4.png    the same, and a picture of where its values lie
"""

from __future__ import annotations

import argparse
import inspect
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qgate.formats import ElementFormat, Format

_PER_ROW = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a format or alias, such as mxfp8")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    from qgate import formats
    from qgate.errors import QgateError

    if args.name is None:
        if args.plot is not None:
            raise QgateError(f"--plot {args.plot} needs a format: qgate formats NAME --plot FILE.")
        print(table())
        return 0
    fmt = formats.get(args.name)
    print("\n".join(describe(fmt)))
    if args.plot is not None:
        from qgate.charts.formats import draw_values

        draw_values(
            args.plot,
            title=fmt.name,
            values=fmt.values(),
            min_normal=fmt.min_normal,
            unit="in units of the block's scale" if fmt.kind == "block" else "",
        )
        print(f"\nwrote {args.plot}")
    return 0


def table() -> str:
    """All formats."""
    from tabulate import tabulate

    from qgate import formats

    heads = ["name", "bits", "layout", "max", "normal", "subnormal", "block", "scale", "notes"]
    rows = [
        [
            fmt.name,
            fmt.bits,
            fmt.layout,
            number(fmt.max),
            number(fmt.min_normal),
            number(fmt.min_subnormal) if fmt.min_subnormal < fmt.min_normal else "-",
            fmt.block or "-",
            fmt.scale,
            fmt.notes,
        ]
        for fmt in formats.FORMATS
    ]
    align = ("left", "right", "left", *["right"] * 4, "left", "left")
    text = tabulate(rows, headers=heads, disable_numparse=True, colalign=align)
    other = [
        f"{' '.join(formats.aliases(fmt.name))} = {fmt.name}"
        for fmt in formats.FORMATS
        if formats.aliases(fmt.name)
    ]
    return "\n".join(
        [
            text,
            "",
            "layout: bits of sign, exponent, mantissa; normal, subnormal: the smallest ones.",
            "A block format's figures are in units of its block's scale.",
            textwrap.fill("Other names: " + ", ".join(other) + ".", 80, break_on_hyphens=False),
            "`qgate formats NAME` shows the values of one.",
        ]
    )


def describe(fmt: Format) -> list[str]:
    """Facts, then the values of the codes."""
    from qgate import formats

    other = formats.aliases(fmt.name)
    lines = [f"{fmt.name}" + (f" (also {', '.join(other)})" if other else "")]
    facts = {
        "bits": fmt.bits,
        "layout": fmt.layout,
        "max": number(fmt.max),
        "smallest normal": number(fmt.min_normal),
        "smallest subnormal": number(fmt.min_subnormal),
        "rounding": fmt.rounding,
        "notes": fmt.notes,
    }
    if fmt.kind == "block":
        facts |= {"block": f"{fmt.block} elements", "scale": fmt.scale}
        lines += [f"  {key:18} {value}" for key, value in facts.items()]
        lines += ["", *(inspect.getdoc(type(fmt)) or "").splitlines()]
        lines += [
            "",
            f"values of an element, {fmt.element.name}, in units of the block's scale:",
            "",
        ]
        return lines + codes(fmt.element)
    lines += [f"  {key:18} {value}" for key, value in facts.items()]
    return [*lines, "", *codes(fmt)]


def codes(fmt: ElementFormat) -> list[str]:
    """The value of every code, or of every binade where there are thousands."""
    from tabulate import tabulate

    if fmt.bits > 8:
        return binades(fmt)
    values = fmt.code_values()
    half = len(values) // 2
    mirrored = [
        code
        for code in range(half)
        if not (values[code + half] == -values[code] or math.isnan(values[code + half]))
    ]
    shown = half if not mirrored else len(values)
    width = 2 if fmt.bits > 4 else 1
    rows = [
        [f"0x{start:0{width}X}", *(number(v) for v in values[start : start + _PER_ROW])]
        for start in range(0, shown, _PER_ROW)
    ]
    heads = ["code", *(f"+{i}" for i in range(min(_PER_ROW, shown)))]
    lines = tabulate(rows, headers=heads, disable_numparse=True, stralign="right").splitlines()
    if shown == half:
        single = fmt.negative_zero is None
        special = f" (0x{half:02X} is {number(values[half])})" if single else ""
        lines.append(f"\ncodes from 0x{half:0{width}X}: the same with a minus sign{special}")
    return lines


def binades(fmt: ElementFormat) -> list[str]:
    """Per power of two: how many values and how far apart."""
    from tabulate import tabulate

    values = fmt.magnitudes()[1:]
    exponents = [math.frexp(v)[1] - 1 for v in values]
    rows = []
    for exponent in sorted(set(exponents), reverse=True):
        first, last = exponents.index(exponent), len(exponents) - exponents[::-1].index(exponent)
        inside = values[first:last]
        step = number(inside[1] - inside[0]) if len(inside) > 1 else "-"
        rows.append([f"2^{exponent}", len(inside), step, number(inside[-1])])
    heads = ["from", "values", "step", "to"]
    return tabulate(rows, headers=heads, disable_numparse=True, stralign="right").splitlines()


def number(value: float) -> str:
    """Short and exact: 448, 2^-9, 1.5*2^-10, or 3.39e+38 where that would be long."""
    value = float(value)
    if not math.isfinite(value):
        return str(value).replace("inf", "Inf").replace("nan", "NaN")
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    fraction, exponent = math.frexp(abs(value))
    sign, one_to_two = "-" if value < 0 else "", fraction * 2
    if one_to_two == 1 and (exponent < -2 or exponent > 20):
        return f"{sign}2^{exponent - 1}"
    if len(repr(value)) <= 9:
        return repr(value).removesuffix(".0")
    if float(f"{one_to_two:g}") == one_to_two:
        return f"{sign}{one_to_two:g}*2^{exponent - 1}"
    return f"{value:.6g}"
