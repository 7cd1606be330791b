"""The parts of a sweep's text that state facts: input, parameters, and the tables of levels."""

from __future__ import annotations

import textwrap

from qgate.sweeps.record import (
    Record,
    exponent_text,
    format_title,
    number,
    share_text,
    short,
    usual_exponent,
    usual_kind,
)
from qgate.text import one_line

THICK, THIN, DASHES = "=" * 80, "-" * 80, "-" * 40
_WIDTH = 94
_USUAL = {"production": "Production", "amax": "amax / max", "cast": "Plain Cast"}
_ENDS = {
    "exact": ("maximum alignment, nothing overflows", "minimum alignment, nothing underflows"),
    "documented": ("documented maximum alignment", "documented minimum alignment"),
    "given": ("as given", "as given"),
    "maximum given": ("as given", "minimum alignment, nothing underflows"),
    "minimum given": ("maximum alignment, nothing overflows", "as given"),
}


def title(text: str) -> list[str]:
    return [THICK, text, THICK]


def heading(text: str) -> list[str]:
    return [text, DASHES]


def item(text: str, indent: int = 0, hang: int = 2) -> list[str]:
    """One statement, wrapped; what follows its first line is indented further."""
    first = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def failure(record: Record) -> list[str]:
    """The first and the last word on a tensor with values that no format holds."""
    if not record.get("failed"):
        return []
    return [
        *item(f"❌ This tensor does not pass: {one_line(record['failed'])}.", hang=3),
        "   All figures cover its finite values only; no scale repairs the others.",
    ]


def _dtype(record: Record) -> str:
    tensor = record["tensor"]
    rounded = tensor.get("rounded_to")
    return f"{tensor['dtype']}, rounded to {rounded} first" if rounded else str(tensor["dtype"])


def _counted(record: Record) -> str:
    tensor = record["tensor"]
    words = []
    for key, what in (("zeros", "zeros"), ("nan", "NaN"), ("posinf", "+Inf"), ("neginf", "-Inf")):
        count = int(tensor[key])
        share = f" ({share_text(count / tensor['elements'])})" if count else ""
        words.append(f"{what}: {count}{share}")
    return ", ".join(words)


def _range(record: Record) -> str:
    tensor = record["tensor"]
    return f"[{short(number(tensor['min']))}, {short(number(tensor['max']))}]"


def input_lines(record: Record) -> list[str]:
    """Whose numbers these are: the hash tells two tensors of one name apart."""
    tensor = record["tensor"]
    return [
        *heading("INPUT TENSOR:"),
        f"  Name: {one_line(tensor['name'])}",
        f"  Path: {one_line(tensor['path']) if tensor.get('path') else 'not from a file'}",
        f"  Shape: {list(tensor['shape'])}, {tensor['elements']} elements",
        f"  Dtype: {_dtype(record)}",
        f"  SHA-256: {tensor.get('sha256') or '-'}",
        f"  Range: {_range(record)}",
        f"  Magnitudes: largest {short(number(tensor['amax']))}, "
        f"smallest non-zero {short(number(tensor['amin']))}",
        f"  Mean: {short(number(tensor['mean']))}, Std: {short(number(tensor['std']))}",
        f"  Counts: {_counted(record)}",
    ]


def origin_lines(record: Record) -> list[str]:
    """The input in brief, for a sweep that follows another one of the same tensor."""
    tensor = record["tensor"]
    origin = f"  Path: {one_line(tensor['path'])}" if tensor.get("path") else ""
    digest = f"  SHA-256: {tensor['sha256']}" if tensor.get("sha256") else ""
    name = f"  Input: {list(tensor['shape'])}, {_dtype(record)}, range {_range(record)}"
    return [line for line in (name, origin, digest) if line]


def parameter_lines(record: Record) -> list[str]:
    """What was asked for, with the format's figures and the exponent that is in use today."""
    given, fmt = record["parameters"], record["format"]
    low = number(fmt.get("min_subnormal"))
    subnormal = f"smallest subnormal {short(low)}, " if low < number(fmt["min_normal"]) else ""
    body = [
        *heading("PARAMETERS:"),
        *item(
            f"Format: {format_title(record)}, {fmt['bits']} bits, max {short(number(fmt['max']))}, "
            f"smallest normal {short(number(fmt['min_normal']))}, {subnormal}"
            f"rounding {fmt['rounding']}",
            2,
        ),
    ]
    if record["kind"] == "block":
        body += item(
            f"Blocks: {given['block']} elements along axis {given['axis']}; each keeps its own "
            f"shared exponent (scale rule {given['scale_rule']}) and the sweep adds one offset to "
            f"all of them. Offset 0 is what production uses.",
            2,
        )
        return body
    largest = 2 ** (int(given["scale_bits"]) - 1) - 1
    upper, lower = _ENDS[given["alignment"]]
    first, last = exponent_text(given["max_exp"]), exponent_text(given["min_exp"])
    return [
        *body,
        f"  Scale Bits: {given['scale_bits']} (E8M0: integers from {-largest} to {largest})",
        *item(f"Scale Exponents: {first} ({upper}) to {last} ({lower})", 2),
        f"  Levels: {len(record['levels'])}, {given['levels']} asked for, and integers to the best",
        f"  {_USUAL[usual_kind(record)]} Exponent: {exponent_text(usual_exponent(record))}",
    ]
