"""The colors of all pictures.

They are those of Okabe and Ito, which readers of all kinds of color vision can distinguish; maps of
cells have one ramp for sizes and one for differences.
"""

from __future__ import annotations

from zlib import crc32

BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, PURPLE, BLACK = "#56b4e9", "#e69f00", "#7b5ea7", "#000000"
WINE, OLIVE, TEAL, INDIGO, SAND = "#882255", "#999933", "#44aa99", "#332288", "#b8a44c"
ROSE, SLATE, COCOA = "#cc6677", "#6b8e9e", "#8c564b"
# The colors of series; black comes last.
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, PURPLE, BLACK)
# The colors of errors, of losses and of advice can also be read as text on white.
RED, BROWN, DARK_GREEN = "#c0392b", "#a35a00", "#00694c"
WARN = RED
WHITE, GRAY, PALE, GROUND, INK = "#ffffff", "#8a8a8a", "#c8c8c8", "#f1f1f1", "#444444"
# A format has one color in all pictures; the usual ones have the colors that differ most.
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
    "nf4": "#b5651d",
    "bnb_fp4": "#d9a066",
    "lloyd2": "#8fb8de",
    "lloyd3": "#4f83b5",
    "lloyd4": "#234f7d",
    "fp8_e4m3fnuz": "#5fbf8f",
    "fp8_e5m2fnuz": "#e3a6c6",
    "fp8_e4m3b11fnuz": "#2f7d5b",
    "nvfp4_row": "#a78bc9",
    "nvfp4_4over6": "#5a3d82",
    "nvfp4_pow2": "#c3b1dc",
    "nvfp4_ue5m3": "#8d3fa0",
    "if4": "#1b7f79",
    "if3": "#7fc4bd",
    "if6_e2m3": "#0f4f4b",
    "if6_e3m2": "#4d9a5f",
    "mixfp4": "#b0652f",
    "fp8_ue5m3": "#3b9e9e",
    "int2": "#e0a3ad",
    "uint8": "#c98a4b",
    "uint4": "#a04a58",
    "uint2": "#7a3540",
    "float32": GRAY,
    "float64": INK,
}
_NEW = (WINE, OLIVE, TEAL, INDIGO, SAND, ROSE, SLATE, COCOA)
# Words on pale cells, which no theme turns.
ON_PALE = "#010101"
PALETTE = frozenset((*COLORS, *FORMAT_COLORS.values(), *_NEW, RED, WHITE, PALE, GROUND, ON_PALE))
# Steps of a heat map from the smallest error to the largest, each with the color of its text.
HEAT_LIGHT = (
    ("#f1f6fb", "#10202f"), ("#dce9f5", "#10202f"), ("#c2d9ee", "#10202f"),
    ("#9dc4e3", "#10202f"), ("#6fa8d3", "#0a1622"), ("#3375ad", "#ffffff"),
    ("#1f5d97", "#ffffff"), ("#08386b", "#ffffff"),
)  # fmt: skip
HEAT_DARK = (
    ("#16222e", "#e6edf3"), ("#1b3146", "#e6edf3"), ("#204463", "#e6edf3"),
    ("#265a86", "#ffffff"), ("#2f71a9", "#ffffff"), ("#5f9fd4", "#0a1622"),
    ("#8dbce6", "#0a1622"), ("#bcdaf4", "#0a1622"),
)  # fmt: skip
MAP, DIVERGING = "cividis", "PuOr"
MAPS = (MAP, DIVERGING)


def format_color(name: str) -> str:
    """Return the color of a format, the same in every picture; a new format has one too."""
    number = crc32(name.encode("utf-8", "surrogatepass"))
    return FORMAT_COLORS.get(name) or _NEW[number % len(_NEW)]
