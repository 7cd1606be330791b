"""What builds the site: links are moved, and links that lead nowhere are found.

The site itself is built by CI, where a warning of Sphinx or a broken link is an error.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", SITE / "build.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_page_is_in_the_contents(build: ModuleType) -> None:
    listed = [name for names in build.CONTENTS.values() for name in names]
    assert sorted(listed) == sorted(build.pages(ROOT / "docs"))
    assert len(listed) == len(set(listed))
    assert set(build.MOVED.values()) == {"index.md", "comparison.md", "changelog.md"}


def test_every_benchmark_is_on_the_page_with_its_command(build: ModuleType) -> None:
    text = build.comparison()
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    commands = re.findall(r"`(python benchmarks/\w+\.py)", results)
    assert len(commands) >= 10
    table = text.partition("\n## ")[0]
    for command in commands:
        assert command in table
    for name, anchor in re.findall(r"^\| \[(.+?)\]\(#(.+?)\)", table, re.MULTILINE):
        assert f"\n## {name}\n" in text
        assert anchor == build.slug(name)


def test_links_are_moved(build: ModuleType) -> None:
    text = "[a](docs/ci.md#x) [b](benchmarks/RESULTS.md) [c](https://x.org/docs/) [d](#here)"
    assert build.relinked(text, "") == (
        "[a](ci.md#x) [b](comparison.md) [c](https://x.org/docs/) [d](#here)"
    )
    assert build.relinked("[`conf`](../pyproject.toml), [x](gone.md)", "docs") == (
        "`conf`, [x](gone.md)"
    )
    assert build.relinked("[a](../README.md) [b](ci/sharded.yml)", "docs") == (
        "[a](index.md) [b](ci/sharded.yml)"
    )
    text = "[a](../gates.md#x) [b](first-dump.md) [c](../../README.md) [d](../../conftest.py)"
    assert build.relinked(text, "docs/tutorials") == (
        "[a](../gates.md#x) [b](first-dump.md) [c](../index.md) d"
    )


def test_every_command_and_option_is_on_the_page(build: ModuleType) -> None:
    text = "\n".join(build.options())
    assert "\n## qgate baselines accept\n" in f"\n{text}"
    for name in ("--qgate-across-weights", "--qgate-update-which", "--relative-mse", "--parent"):
        assert name in text, name


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="b.html#there">', ""),
        ('<a href="#top"><a id="top">', ""),
        ('<a href="https://example.org">', ""),
        ('<a href="c.html">', "a.html: c.html leads nowhere"),
        ('<a href="b.html#show&verdict=failed">', ""),
        ('<a href="b.html#gone">', "a.html: b.html#gone has no such anchor"),
        ('<script src="https://cdn.example.org/x.js">', "a.html: loads https://cdn.example.org/x.js"),
        ('<link href="//cdn.example.org/x.css">', "a.html: loads //cdn.example.org/x.css"),
        ('<img src="gone.png">', "a.html: gone.png leads nowhere"),
    ],
)  # fmt: skip
def test_links_are_followed(build: ModuleType, tmp_path: Path, body: str, found: str) -> None:
    (tmp_path / "a.html").write_text(body)
    (tmp_path / "b.html").write_text('<p id="there">')
    assert list(build.broken(tmp_path)) == ([found] if found else [])


def test_style_sheets_load_nothing_from_elsewhere(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text(
        '@import "https://fonts.example.org/x"; b {background: url(x.png)}'
    )
    assert list(build.broken(tmp_path)) == ["a.css: loads https://fonts.example.org/x"]
