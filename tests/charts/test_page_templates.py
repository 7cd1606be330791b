"""Templates of pages: what is put into them stays text, and what they lack is an error."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from qgate.charts.pages import Cell, _environment, leading, number, render
from qgate.text.findings import Finding
from tests.charts.page_reader import PageReader
from tests.hostile import HOSTILE

ROOT = Path(__file__).parents[2]
PARTS = """{% import "charts/parts.html.j2" as parts %}
{% call parts.section(name, name) %}{{ parts.empty(name) }}{% endcall %}
{{ parts.contents([(name, name, 3)]) }}{{ parts.finding_list([finding]) }}
{{ parts.picture({'path': name ~ '.png', 'title': name, 'about': name, 'svg': '', 'width': 1}) }}
{{ parts.absent([(name, name)]) }}{{ parts.table([name], [[cell, cell]], 1, name) }}
{{ parts.file_list([name]) }}{{ parts.notes([name]) }}{{ name|breaking }}<pre>{{ name|lines }}</pre>
"""


def parts(name: str) -> str:
    cell = Cell(name, name[::-1])
    return (
        _environment()
        .from_string(PARTS)
        .render(name=name, cell=cell, finding=Finding("fail", name))
    )


def names_of(page: PageReader) -> tuple[list[str], set[str]]:
    """The names of all tags but breaks within words, and of all attributes."""
    attributes = {name for _, values in page.tags for name in values}
    return [tag for tag, _ in page.tags if tag != "wbr"], attributes


def test_names_are_text_in_every_part() -> None:
    tags, attributes = names_of(PageReader(parts("name")))
    for name in HOSTILE:
        html = parts(name)
        hostile_tags, hostile_attributes = names_of(PageReader(html))
        assert hostile_tags == tags, name[:80]
        assert hostile_attributes <= attributes | {"data-key"}, name[:80]
        assert not [char for char in html if char != "\n" and not char.isprintable()], name[:80]


def test_lines_break_in_names_but_not_in_numbers() -> None:
    html = _environment().from_string("{{ text|breaking }}").render(text="layers.0.up:input -0.62")
    assert html == "layers.<wbr>0.<wbr>up:<wbr>input -0.62"


def test_a_name_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("charts/page")


def test_numbers_sort_by_themselves_and_those_that_are_none_last() -> None:
    assert number(1234.5) == Cell("1230", "1234.5")
    assert number(float("nan"), "x") == Cell("–", "nan")
    assert number(2, "two", bad=True) == Cell("two", "2.0", "fail")


def test_a_wheel_carries_templates_styles_and_scripts() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["qgate"]
    package = ROOT / "qgate"
    carried = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for ending in ("j2", "css", "js") for path in package.rglob(f"*.{ending}")}
    assert len(files) > 10
    assert files <= carried


def test_no_template_links_to_the_network() -> None:
    for path in (ROOT / "qgate").rglob("*.j2"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href)=['\"]?(?:https?:)?//", text), path
        assert "@import" not in text


@pytest.mark.parametrize(
    ("sentence", "headline"),
    [
        ("Nothing is lost.", "Nothing is lost"),
        ("aaa bb, cc: " + 30 * "d", "aaa bb …"),
        ("aaa bb, cc; " + 30 * "d", "aaa bb, cc …"),
        (40 * "x", "xxxxxxxxx…xxxxxxxxxx"),
    ],
)
def test_a_long_headline_ends_where_a_clause_ends(sentence: str, headline: str) -> None:
    most = 11 if ":" in sentence else 20
    assert leading(sentence, most) == headline
