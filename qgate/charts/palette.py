"""The colors of all pictures.

They are Okabe and Ito's, which readers of all kinds of color vision tell apart; maps of cells have
one ramp for sizes and one for differences.
"""

from __future__ import annotations

from zlib import crc32

BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, PURPLE, BLACK = "#56b4e9", "#e69f00", "#7b5ea7", "#000000"
WINE, OLIVE, TEAL, INDIGO, SAND = "#882255", "#999933", "#44aa99", "#332288", "#b8a44c"
ROSE, SLATE, COCOA = "#cc6677", "#6b8e9e", "#8c564b"
# What is told apart by its color; black comes last.
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, PURPLE, BLACK)
# What is wrong, what costs, what is advised: also fit for text on white.
RED, BROWN, DARK_GREEN = "#c0392b", "#a35a00", "#00694c"
WARN = RED
WHITE, GRAY, PALE, GROUND, INK = "#ffffff", "#8a8a8a", "#c8c8c8", "#f1f1f1", "#444444"
BLUES = ("#cfe3f1", "#93c4df", "#4292c6", "#08519c")
# A format has one color in all pictures; the usual ones have those that are easiest told apart.
FORMAT_COLORS = {
    "mxfp8_e4m3": BLUE,
    "mxfp4_e2m1": ORANGE,
    "fp8_e4m3": GREEN,
    "fp8_e5m2": PINK,
    "hif8": SKY,
    "fp16": YELLOW,
    "nvfp4": PURPLE,
    "bf16": BLACK,
    "int8": BROWN,
    "int4": ROSE,
    "fp4_e2m1": WINE,
    "fp6_e3m2": OLIVE,
    "fp6_e2m3": SAND,
    "mxfp8_e5m2": INDIGO,
    "mxfp6_e3m2": TEAL,
    "mxfp6_e2m3": DARK_GREEN,
    "mxint8": SLATE,
    "hif4": COCOA,
    "float32": GRAY,
    "float64": INK,
}
# What other tools call formats.
FORMAT_ALIASES = {
    "hifp8": "hif8",
    "mxfp8": "mxfp8_e4m3",
    "mxfp4": "mxfp4_e2m1",
    "bfloat16": "bf16",
}
_NEW = (WINE, OLIVE, TEAL, INDIGO, SAND, ROSE, SLATE, COCOA)
PALETTE = frozenset(
    (*COLORS, *FORMAT_COLORS.values(), *_NEW, *BLUES, RED, BROWN, DARK_GREEN, WHITE, GRAY, PALE)
) | {GROUND, INK}
MAP, DIVERGING = "cividis", "PuOr"
MAPS = (MAP, DIVERGING)


def format_color(name: str) -> str:
    """The color of a format, whatever else is in the picture; a new format keeps its own too."""
    known = FORMAT_COLORS.get(name)
    return known or _NEW[crc32(name.encode("utf-8", "surrogatepass")) % len(_NEW)]
