"""What builds the site: links are moved, and links that lead nowhere are found.

The site itself is built by CI, where a warning of Sphinx or a broken link is an error.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", SITE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    pages = build.options()
    assert "\n## qgate baselines accept\n" in pages["gate"]
    for page, name in (
        ("suites", "--qgate-across-weights"),
        ("suites", "--qgate-update-which"),
        ("look", "--relative-mse"),
        ("checkpoints", "--parent"),
    ):
        assert name in pages[page], name
    for name in set(pages) - {"options"}:
        assert f"(options/{name}.md)" in pages["options"]


def test_every_public_name_is_described_once(build: ModuleType) -> None:
    pages = build.api()
    assert set(pages) == {"api", *build.API}
    for page in set(pages) - {"api"}:
        assert pages[page].count("```") == 2, f"{page}: a block of directives is not closed"
        assert f"(api/{page}.md)" in pages["api"]
    text = "\n".join(pages.values())
    for package in build.API:
        for member, _ in build.members(package):
            assert len(re.findall(rf"^\.\. .*:: {package}\.{member}$", text, re.MULTILINE)) == 1
    assert "The same as :py:obj:`qgate.Mode`." in pages["qgate.modes"]


def test_words_of_the_glossary_are_terms(build: ModuleType) -> None:
    text = "# Concepts\n\n| word | means |\n|---|---|\n| **a**, **b c** | x `|` |\n\nThe end.\n"
    assert build.glossary(text) == [(["a", "b c"], "x `|`")]
    page = build.with_glossary(text)
    assert page == "# Concepts\n\n```{glossary}\n\na\nb c\n  x `|`\n```\n\nThe end.\n"
    with pytest.raises(SystemExit, match="no table of words"):
        build.with_glossary("# Concepts\n")


WORDS = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize(
    ("article", "found"),
    [
        (f"<p>{WORDS}</p>", ""),
        (f"<p>{WORDS}</p><p>Write <code>.. note</code></p>", ""),
        (f"<p>.. autoclass:: qgate.Encoded :members: {WORDS}</p>", "'.. autoclass::' stayed text"),
        (f"<pre><span>.. autodata:: x</span></pre>{WORDS}", "'.. autodata::' stayed text"),
        (f"<p>```{{eval-rst}} {WORDS}</p>", "'```{eval-rst}' stayed text"),
        (f"<p>:::{{note}} {WORDS}</p>", "':::{note}' stayed text"),
        (f"<p>see {{doc}}<code>x</code> {WORDS}</p>", "'{doc}' stayed text"),
        (f"<p>see :py:obj: {WORDS}</p>", "':py:obj:' stayed text"),
        (f'{WORDS} <span class="problematic">`gone`_</span>', "a name that nothing resolves (problematic)"),
        (f'{WORDS} <aside class="system-message error">', "a name that nothing resolves (system-message error)"),
        ("<h1>Seeds</h1>", "a page of 1 words"),
        ("", "a page of 0 words"),
    ],
)  # fmt: skip
def test_unfinished_pages_are_named(
    build: ModuleType, tmp_path: Path, article: str, found: str
) -> None:
    text = f"<nav>{WORDS} .. toctree::</nav><article>{article}</article>"
    (tmp_path / "a.html").write_text(text)
    (tmp_path / "search.html").write_text("<article></article>")
    assert list(build.unfinished(tmp_path)) == ([f"a.html: {found}"] if found else [])


def test_what_the_search_does_not_know_is_named(build: ModuleType, tmp_path: Path) -> None:
    terms = [word for words, _ in build.glossary(build.CONCEPTS.read_text()) for word in words]
    assert "K tail" in terms
    objects: dict[str, list[list[object]]] = {
        package: [[0, 0, 1, "", name] for name, _ in build.members(package)]
        for package in build.API
    }
    index = {"objects": objects, "indexentries": {word.lower(): [] for word in terms}}

    def lacking() -> list[str]:
        (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
        return list(build.unfindable(tmp_path))

    assert lacking() == []
    del index["indexentries"]["k tail"]
    objects["qgate"] = [entry for entry in objects["qgate"] if entry[4] != "encode"]
    assert lacking() == [
        "the search does not find 'K tail'",
        "the search does not find 'qgate.encode'",
    ]


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
