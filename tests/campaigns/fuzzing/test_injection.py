"""Names and texts of others, in every place where one is shown: nothing of them is obeyed.

Pages in a browser are in tests/page and tests/charts; here are terminals, tables, Markdown, XML,
drawings and the commands that services of CI read out of what is printed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from qgate.baselines import Key
from qgate.charts.svg import document, label
from qgate.cli import main
from qgate.results import github_error, junit_properties, markdown_summary, to_csv
from qgate.results.ci import github_annotation
from qgate.text import for_terminal, one_line
from tests.baselines.building import accepting, recorded
from tests.dumps.making import write as write_dump
from tests.results.making import record, write
from tests.shares import share

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "attribute": "\"><img src=x onerror=alert(1)>'",
    "end of data": "]]></style></svg></script><b>",
    "markdown": "|a`b`*c*[d](http://x)<b>![e](http://x/y.png)",
    "formula": "=cmd|' /C calc'!A0",
    "formula with a plus": "+1+1",
    "formula with an at": "@SUM(1)",
    "colors": "\x1b[31mred\x1b]0;title\x07\x1b[2J",
    "return": "good\rbad",
    "direction": "\u202edlrow\u2066x",
    "command": "a\n::error::owned",
    "command, older": "##[error]owned",
    "command of Azure": "##vso[task.setvariable variable=x]y",
    "command in percent": "a%0A::error::owned",
    "section of GitLab": "section_start:1:x[collapsed=true]\r\x1b[0Kx",
    "zero": "a\0b",
    "half a character": "a\ud800b",
    "long": "long " * 2000,
    "nothing": "",
}
_COMMANDS = re.compile(r"^\s*::[a-z-]+|##\[|##vso\[", re.MULTILINE)
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
named = pytest.mark.parametrize("name", HOSTILE)


def assert_calm(text: str) -> None:
    """Nothing in it that a terminal or a service of CI would obey."""
    assert not _OBEYED.search(text), ascii(_OBEYED.search(text))
    assert not _COMMANDS.search(text)


def said(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with contextlib.suppress(SystemExit):
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


def rows(name: str) -> list[dict[str, object]]:
    bad = HOSTILE[name]
    return [
        record(bad, 1.0, mode=bad, model=bad, layer=bad, suite=bad, node=bad, scope=bad, file=bad, line=3),
        record("good"),
    ]  # fmt: skip


@named
def test_terminal_and_files_of_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = HOSTILE[name]
    write(tmp_path / "results.jsonl", *rows(name), commit=bad, device=bad, modes=[bad], notes=[bad],
          errors=[bad], broken={bad: bad}, models={bad: {"weights": bad}})  # fmt: skip
    forms = [f"--output=r{ending}" for ending in (".md", ".csv", ".html")]
    assert_calm(said(capsys, "report", "results.jsonl", *forms))
    for ending in ("md", "csv", "html"):
        assert not _OBEYED.search(
            (tmp_path / f"r.{ending}").read_text(encoding="utf-8").replace("\r\n", "\n")
        )
    assert elements_that_act((tmp_path / "r.html").read_text(encoding="utf-8")) == set()


def elements_that_act(html: str) -> set[str]:
    """Elements that run or load something, beside those of the page itself."""
    tags: set[str] = set()
    scripts = 0

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            nonlocal scripts
            scripts += tag == "script"
            if tag in ("iframe", "object", "embed", "base", "link", "meta") and dict(attrs).get(
                "http-equiv"
            ):
                tags.add(tag)
            if tag in ("iframe", "object", "embed", "base"):
                tags.add(tag)
            for key, value in attrs:
                if key.startswith("on") or str(value).strip().lower().startswith("javascript:"):
                    tags.add(f"{tag} {key}")
                if key in ("src", "href") and re.match(r"(https?:)?//", str(value)):
                    tags.add(f"{tag} {key}")

    Reader().feed(html)
    assert scripts == 1, "the page's own"
    return tags


@named
def test_markdown_has_one_table_and_no_element_of_its_own(name: str) -> None:
    text = markdown_summary(rows(name), broken=[HOSTILE[name]], about=HOSTILE[name])
    assert_calm(text)
    plain = re.sub(r"`[^`\n]*`", "", text)
    for own in ("<details><summary>All failures</summary>", "</details>"):
        assert plain.count(own) == 1, "failures are folded"
        plain = plain.replace(own, "")
    assert not re.search(r"<[a-zA-Z/!]", plain), "an element"
    assert not re.search(r"\]\(", plain), "a link"
    bodies = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(line.split("|")) for line in bodies} == {10, 11}, "eight cells, or nine"


@named
def test_cells_are_no_formulas(name: str, tmp_path: Path) -> None:
    to_csv(rows(name), tmp_path / "r.csv")
    read = list(csv.reader(io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8"))))
    assert len({len(row) for row in read}) == 1
    for row in read:
        for cell in row:
            assert not cell.startswith(("=", "+", "@", "\t", "\r")), cell
            assert not _OBEYED.search(cell)


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """As the runner of GitHub reads a command."""
    match = re.fullmatch(r"::([a-z-]+) ?([^\n]*?)::([^\n]*)", line)
    assert match is not None, line

    def back(text: str, more: tuple[tuple[str, str], ...] = ()) -> str:
        for code, char in (*more, ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, char)
        return text

    pairs = [pair.partition("=") for pair in match[2].split(",") if pair]
    properties = {key: back(value, (("%3A", ":"), ("%2C", ","))) for key, _, value in pairs}
    return match[1], properties, back(match[3])


@named
def test_an_annotation_is_one_command(name: str) -> None:
    bad = HOSTILE[name]
    for line in (github_annotation(rows(name)[0]), github_error(bad)):
        assert line is not None
        assert "\n" not in line
        assert "\r" not in line
        kind, properties, message = parsed(line)
        assert kind == "error"
        assert set(properties) <= {"file", "line", "title"}
        assert message or not bad
    _, properties, _ = parsed(str(github_annotation(rows(name)[0])))
    assert properties["file"] == one_line(bad)
    assert properties["line"] == "3"


@named
def test_junit_properties_are_xml(name: str) -> None:
    pairs = junit_properties(rows(name)[0])
    suite = ET.Element("properties")
    for key, value in pairs:
        ET.SubElement(suite, "property", {"name": key, "value": str(value)})
    reread = ET.fromstring(ET.tostring(suite, encoding="utf-8"))
    assert [(element.get("name"), element.get("value")) for element in reread] == pairs


@named
def test_a_drawing_has_no_element_of_its_own(name: str) -> None:
    bad = HOSTILE[name]
    good, drawing = (ET.fromstring(document(9, 9, x, x, label(1, 1, x))) for x in ("x", bad))
    assert {element.tag for element in drawing.iter()} == {
        plain_element.tag for plain_element in good.iter()
    }
    assert {key for node in drawing.iter() for key in node.attrib} == {
        key for plain_node in good.iter() for key in plain_node.attrib
    }


@share(6)
@named
def test_a_dump_is_listed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = HOSTILE[name]
    if name == "half a character":
        bad = bad.encode("ascii", "backslashreplace").decode()
    fields = {"module": bad, "name": bad or "x", "quant_type": bad, "layer_type": bad or "x"}
    write_dump(tmp_path / "d", [torch.ones(3)], told={k: v for k, v in fields.items() if k != "module"},
               header={"model": bad, bad or "x": bad})  # fmt: skip
    for command in ("ls", "info", "verify"):
        assert_calm(said(capsys, "dumps", command, tmp_path / "d"))
    assert_calm(said(capsys, "dumps", "ls", tmp_path / "d", "--where", f"name={bad}?"))


@share(6)
@named
def test_names_of_tensors_and_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = HOSTILE[name]
    key = re.sub("[/\0\ud800]", "_", bad)[:100] or "x"
    np.savez(tmp_path / "t.npz", **{key: np.ones((4, 8), np.float32)})
    assert_calm(said(capsys, "sweep", "t.npz", "--no-plots"))
    (tmp_path / f"{key}.pt").write_bytes(b"no tensor")
    assert_calm(said(capsys, "sweep", f"{key}.pt", "--no-plots"))
    if "\0" not in bad:
        assert_calm(
            said(
                capsys,
                "sweep",
                f"missing {bad[:100]}.pt".replace("\ud800", ""),
                "--no-plots",
            )
        )


@share(6)
@named
def test_baselines_are_listed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = HOSTILE[name]
    if name in ("half a character", "nothing"):
        return
    store = recorded(tmp_path / "b")
    store.commit(accepting({Key(bad, bad, bad, bad): 1.0}, "2-4"))
    for command in (("list",), ("verify",)):
        assert_calm(said(capsys, "baselines", *command, "--baselines", tmp_path / "b"))


WAYS: dict[str, Callable[[str], list[str]]] = {
    "mode": lambda bad: ["layers", "capture", "--mode", bad, "--model", "tiny-llama"],
    "model": lambda bad: ["layers", "calibrate", "--model", f"hf:{bad}"],
    "format": lambda bad: ["show", "formats", bad],
    "modes": lambda bad: ["show", "modes", bad],
    "results": lambda bad: ["report", bad],
    "merge": lambda bad: ["report", bad, "--merge", "qgate-out"],
    "dump": lambda bad: ["dumps", "info", bad],
    "baselines": lambda bad: ["baselines", "verify", "--baselines", bad],
    "settings": lambda bad: ["activations", "--model", "tiny-llama", "--config", bad],
    "key": lambda bad: ["activations", "--model", "tiny-llama", f"--x{bad}", bad],
}


@named
@pytest.mark.parametrize("way", WAYS)
def test_what_is_typed_is_repeated_without_being_obeyed(
    way: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = HOSTILE[name]
    if "\0" in bad or name == "half a character":
        bad = "a\x01b"  # no command line can have it
    assert_calm(said(capsys, *WAYS[way](bad or " ")))


def test_a_message_keeps_its_lines() -> None:
    assert for_terminal("one\n  two") == "one\n  two"
    assert for_terminal("x\n::error::y\r##[group]\x1b[0m") == "x\n| ::error::y\\r# #[group]\\x1b[0m"
