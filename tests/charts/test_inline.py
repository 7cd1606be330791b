"""Sheets as SVG of a page: the same picture, colors of the theme, names as text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from qgate.charts.inline import _DARK, STYLE
from qgate.charts.palette import BLACK, BLUE, DIVERGING, MAP, MAPS, ON_PALE, WHITE
from qgate.charts.sheet import Sheet, sheet
from tests.hostile import HOSTILE

SHAPES = {
    "svg", "g", "path", "text", "tspan", "use", "defs", "clipPath", "rect", "image", "title",
}  # fmt: skip


def drawn(name: str = "layers.0", points: int = 20) -> Sheet:
    """Return a sheet with words, lines, dots and a name that may be anything."""
    picture = sheet(8, 4, f"About {name}")
    axes = picture.figure.subplots()
    axes.plot(range(points), color=BLUE)
    axes.scatter(range(points), range(points), color=BLACK)
    axes.set_title(name.replace("$", r"\$"))
    axes.text(1, 1, "on a dark cell", color=WHITE)
    axes.text(2, 1, "on a pale cell", color=ON_PALE)
    return picture


def elements(svg: str) -> list[str]:
    """Return the names of all elements."""
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    return [element.tag for element in root.iter()]


@pytest.mark.parametrize("name", [*HOSTILE[:20], 'style="fill: #ffffff', "font-family: a", "id=x"])
def test_names_are_words_of_the_picture(name: str) -> None:
    name = "".join(char for char in name if char.isprintable())[:80]
    svg = drawn(name).svg()
    assert set(elements(svg)) <= SHAPES
    assert elements(svg) == elements(drawn("layers.0").svg())


def test_colors_follow_the_page_but_words_on_cells_stay() -> None:
    svg = drawn().svg()
    assert f"stroke: var(--c{BLUE[1:]},{BLUE})" in svg
    assert f"fill: var(--c{WHITE[1:]},{WHITE})" in svg  # the ground
    labels = re.findall(r'<text style="([^"]*)"[^>]*>(on a \w+ cell)', svg)
    words = {text: style for style, text in labels}
    assert "fill: #ffffff" in words["on a dark cell"]
    assert f"fill: {ON_PALE}" in words["on a pale cell"]
    assert all(f"--c{color[1:]}:{dark}" in STYLE for color, dark in _DARK.items())


def test_a_picture_leaves_nothing_to_the_page() -> None:
    svg = drawn().svg()
    assert "<style" not in svg
    assert "http" not in svg
    assert "font-family" not in svg
    named = set(re.findall(r' id="([^"]+)"', svg))
    assert named == {name for name in named if f"#{name}" in svg}


def test_very_many_dots_are_one_image() -> None:
    many, few = drawn(points=5000).svg(), drawn().svg()
    assert "image" in elements(many)
    assert "image" not in elements(few)
    assert len(many) < 400_000


def test_a_map_with_a_white_middle_is_dimmed_in_the_dark() -> None:
    texts = {}
    for name in MAPS:
        page = sheet(3, 2, "Cells")
        page.figure.add_subplot().imshow([[-1.0, 1.0]], cmap=name)
        texts[name] = page.svg()
    assert {name: 'class="pale"' in text for name, text in texts.items()} == {
        MAP: False,
        DIVERGING: True,
    }
    assert "@media screen and (prefers-color-scheme:dark)" in STYLE
    assert ".pale image{filter:brightness(" in STYLE
