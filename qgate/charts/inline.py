"""Sheets of matplotlib as SVG for pages: the picture of the PNG, in the colors of the theme."""

from __future__ import annotations

import io
import re
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.charts.palette import (
    BLACK,
    BROWN,
    DIVERGING,
    GROUND,
    INK,
    ON_PALE,
    PALE,
    PALETTE,
    RED,
    WHITE,
)
from qgate.text import for_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is drawn with more points than these is a raster within the SVG.
_MOST_POINTS = 3000
_DPI = 160
# Colors in dark, beside those that are made lighter.
_TURNED = {
    WHITE: "#161b22", GROUND: "#21262d", PALE: "#4a525c", BLACK: "#e6edf3", INK: "#a3adb8",
    RED: "#ff8a8a", BROWN: "#f0b35c",
}  # fmt: skip
_LEAST = 0.42
"""The brightness that a color has on a dark page, at least."""


def _lighter(color: str) -> str:
    """Mix a dark color with white until it can be seen on a dark page."""
    rgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    while float(rgb @ (0.21, 0.72, 0.07)) < _LEAST:
        rgb = 1 - 0.9 * (1 - rgb)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


_LIGHTER = {color: _lighter(color) for color in sorted(PALETTE - {ON_PALE})}
_DARK = {color: dark for color, dark in _LIGHTER.items() if color != dark} | _TURNED
STYLE = (
    "@media screen and (prefers-color-scheme:dark){.sheet{"
    + ";".join(f"--c{color[1:]}:{dark}" for color, dark in _DARK.items())
    + "}.sheet .pale image{filter:brightness(.62)}}"
)
"""The colors of such pictures on a dark page, each in an element of class `sheet`."""
_COLOR = re.compile(rf"(fill|stroke): ({'|'.join(_DARK)})\b")
_TAG, _ID = re.compile(r"<[^>]+>"), re.compile(r' id="([^"]+)"')
_USED = re.compile(r"(?:=\"|url\()#([\w-]+)")
# The font is that of the page, and nothing turns by no degrees.
_NEEDLESS = re.compile(r" ?font-family: [^;\"]*;?| transform=\"rotate\(-?0 [^\"]*\"")


def inline_svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element that follows the colors of its page."""
    import matplotlib

    for artist in figure.findobj(lambda artist: _points(artist) > _MOST_POINTS):
        artist.set_rasterized(True)
    data = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "qgate"}
    with matplotlib.rc_context(settings), np.errstate(all="ignore"):
        figure.savefig(data, format="svg", dpi=_DPI)
    return _themed(data.getvalue().decode("utf-8"), figure, title)


def _points(artist: Any) -> int:
    """Count what a collection draws."""
    paths, offsets = (getattr(artist, name, None) for name in ("get_paths", "get_offsets"))
    if paths is None or offsets is None:
        return 0
    return max(len(offsets()), sum(len(path.vertices) for path in paths()))


def _themed(text: str, figure: Figure, title: str) -> str:
    """Take out what is of a file alone, and let colors be those of the page."""
    body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
    # This style would hold for all of the page.
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    used = set(_USED.findall(body))
    # Names are other people's: nothing changes but tags, in which all of them are escaped.
    body = _TAG.sub(lambda tag: _themed_tag(tag[0], used), body)
    body = re.sub(r"\s*\n\s*", " ", body)
    width, height = (72 * float(inches) for inches in figure.get_size_inches())
    artists: Any = figure.findobj(lambda artist: hasattr(artist, "get_cmap"))
    maps = {artist.get_cmap().name for artist in artists}
    # The middle of such a map is nearly white.
    pale = 'class="pale" ' if DIVERGING in maps else ""
    return (
        f'<svg {pale}viewBox="0 0 {width:g} {height:g}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{for_html(title)}" stroke-linejoin="round" '
        f'fill="var(--c{BLACK[1:]},{BLACK})">{body}</svg>'
    )


def _themed_tag(tag: str, used: Container[str]) -> str:
    """Name the colors of a tag; white words stay white, as they are on dark cells."""

    def named(match: re.Match[str]) -> str:
        is_word = tag.startswith("<text") and match[2] == WHITE
        return match[0] if is_word else f"{match[1]}: var(--c{match[2][1:]},{match[2]})"

    tag = _ID.sub(lambda match: match[0] if match[1] in used else "", tag)
    return _COLOR.sub(named, _NEEDLESS.sub("", tag))
