"""List the number formats, or show one: its facts, its values, a plot.

  qgate show formats                         all formats in one table
  qgate show formats hif8                    facts and the value of every code
  qgate show formats mxfp4 --plot mxfp4.png  the same, and a picture of its values

Without a name all formats are listed.
"""

from __future__ import annotations

import argparse
import inspect
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json, table_text
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.text.printing import print_text

if TYPE_CHECKING:
    from qgate import formats
    from qgate.charts import formats as charts
    from qgate.formats import p3109
else:
    formats, charts = LateModule("qgate.formats"), LateModule("qgate.charts.formats")
    p3109 = LateModule("qgate.formats.p3109")

_PER_ROW = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a format or alias, such as mxfp8")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        if args.plot is not None:
            raise QgateError(
                f"--plot {args.plot} needs a format: qgate show formats NAME --plot FILE."
            )
        listed = [figures(fmt) for fmt in formats.FORMATS] if args.json else None
        print_text(table()) if listed is None else print_json(listed)
        return 0
    fmt = formats.get(args.name)
    if args.json:
        print_json({**figures(fmt), "values": list(fmt.element.code_values())})
    else:
        print_text("\n".join(describe(fmt)))
    if args.plot is not None:
        charts.draw_values(
            args.plot,
            title=fmt.name,
            values=fmt.values(),
            min_normal=fmt.min_normal,
            unit="in units of the block's scale" if fmt.kind == "block" else "",
        )
        if not args.json:
            print_text(f"\nwrote {args.plot}")
    return 0


def figures(fmt: formats.Format) -> dict[str, object]:
    """Return the facts of a format by name, for JSON."""
    names = ("name", "bits", "layout", "max", "min_normal", "min_subnormal", "block", "scale",
             "rounding", "notes")  # fmt: skip
    return {**{name: getattr(fmt, name) for name in names}, "aliases": formats.aliases(fmt.name)}


def table() -> str:
    """Write all formats with their figures."""
    rows: list[list[object]] = [
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
    heads = ["name", "bits", "layout", "max", "normal", "subnormal", "block", "scale", "notes"]
    aliases = {fmt.name: " ".join(formats.aliases(fmt.name)) for fmt in formats.FORMATS}
    other = ", ".join(f"{names} = {name}" for name, names in aliases.items() if names)
    return "\n".join(
        [
            table_text(rows, heads, "left", "right", "left", *["right"] * 4, "left", "left"),
            "",
            "layout: bits of sign, exponent, mantissa; normal, subnormal: the smallest ones.",
            "A block format's figures are in units of its block's scale.",
            textwrap.fill(f"Other names: {other}.", 80, break_on_hyphens=False),
            textwrap.fill(f"By name only: {p3109.ABOUT}.", 80, break_on_hyphens=False),
            "`qgate show formats NAME` shows the values of one.",
        ]
    )


def describe(fmt: formats.Format) -> list[str]:
    """Write facts, then the values of the codes."""
    other = ", ".join(formats.aliases(fmt.name))
    facts = {
        "bits": fmt.bits,
        "layout": fmt.layout,
        "max": number(fmt.max),
        "smallest normal": number(fmt.min_normal),
        "smallest subnormal": number(fmt.min_subnormal),
        "rounding": fmt.rounding,
        "notes": fmt.notes,
    }
    about = [""]
    if fmt.kind == "block":
        facts |= {"block": f"{fmt.block} elements", "scale": fmt.scale}
        about = ["", *(inspect.getdoc(type(fmt)) or "").splitlines(), ""]
        about += [f"values of an element, {fmt.element.name}, in units of the block's scale:", ""]
    head = f"{fmt.name}{f' (also {other})' if other else ''}"
    lines = [head, *(f"  {key:18} {value}" for key, value in facts.items()), *about]
    return lines + codes(fmt.element)


def codes(fmt: formats.ElementFormat) -> list[str]:
    """Write the value of every code, or of every binade where there are thousands."""
    if fmt.bits > 8:
        return binades(fmt)
    values = fmt.code_values()
    half = len(values) // 2
    is_mirrored = all(
        negative == -positive or math.isnan(negative)
        for positive, negative in zip(values[:half], values[half:], strict=True)
    )
    written = half if is_mirrored else len(values)
    width = 2 if fmt.bits > 4 else 1
    rows: list[list[object]] = [
        [f"0x{start:0{width}X}", *(number(v) for v in values[start : start + _PER_ROW])]
        for start in range(0, written, _PER_ROW)
    ]
    heads = ["code", *(f"+{i}" for i in range(min(_PER_ROW, written)))]
    lines = table_text(rows, heads, *["right"] * len(heads)).splitlines()
    if is_mirrored:
        single = fmt.negative_zero is None
        special = f" (0x{half:02X} is {number(values[half])})" if single else ""
        lines.append(f"\ncodes from 0x{half:0{width}X}: the same with a minus sign{special}")
    return lines


def binades(fmt: formats.ElementFormat) -> list[str]:
    """Write per power of two how many values there are and how far apart."""
    inside: dict[int, list[float]] = {}
    for value in fmt.magnitudes()[1:]:
        inside.setdefault(math.frexp(value)[1] - 1, []).append(value)
    rows: list[list[object]] = [
        [
            f"2^{exponent}",
            len(values),
            number(values[1] - values[0]) if len(values) > 1 else "-",
            number(values[-1]),
        ]
        for exponent, values in sorted(inside.items(), reverse=True)
    ]
    return table_text(rows, ["from", "values", "step", "to"], *["right"] * 4).splitlines()


def number(value: float) -> str:
    """Write a short and exact number: 448, 2^-9, 1.5*2^-10, or 3.39e+38 where that is long."""
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
