"""Hostile text in every target: what an independent reader of it finds is one harmless text."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from qgate.text import (
    for_csv,
    for_html,
    for_json,
    for_markdown,
    for_terminal,
    for_workflow,
    for_workflow_property,
    for_xml,
    one_line,
    percent,
    rounded_percent,
)
from tests.hostile import HOSTILE
from tests.tables import each_of

EVERY = each_of("text", HOSTILE)


class Reader(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")

    handle_decl = handle_pi = unknown_decl = handle_comment


def cells_of(row: str) -> list[str]:
    """Split a row of a table as CommonMark with tables does: at bars without a backslash."""
    cells, cell, before = [], "", ""
    for char in row.strip()[1:-1]:
        if char == "|" and before != "\\":
            cells.append(cell.strip())
            cell = ""
        else:
            cell += char
        before = "" if before == char == "\\" else char
    return [*cells, cell.strip()]


def markdown_text(cell: str) -> str:
    """The text that a cell shows: code spans as they are, entities read elsewhere."""
    parts = re.split(r"(`[^`]*`)", cell)
    assert "`" not in "".join(parts[::2]), "a code span that does not end"
    for plain in parts[::2]:
        remaining = re.sub(r"&#?\w+;", "", plain)
        assert not re.search(r"[<>*_\[\]\\~#]|[@$]|://|www\.", remaining), f"live: {plain!r}"
    return "".join(part[1:-1] if at % 2 else html.unescape(part) for at, part in enumerate(parts))


def odd_in(text: str) -> bool:
    """Whether it has a character that is not a letter, mark, number, sign or plain blank."""
    return any(unicodedata.category(char)[0] in "CZ" and char != " " for char in text)


def test_there_are_two_hundred() -> None:
    assert len(HOSTILE) >= 200
    assert len(set(HOSTILE)) == len(HOSTILE)


@EVERY
def test_one_line_is_one_line_of_characters_that_can_be_seen(text: str) -> None:
    escaped = one_line(text)
    assert len(escaped.splitlines()) <= 1
    odd = {char for char in escaped if unicodedata.category(char)[0] == "C"}
    odd |= {char for char in escaped if unicodedata.category(char) in ("Zl", "Zp")}
    assert odd == set()
    escaped.encode("utf-8")
    assert escaped == text or odd_in(text)


@EVERY
def test_a_terminal_and_a_log_obey_nothing(text: str) -> None:
    escaped = for_terminal(text)
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", escaped
    )
    assert not re.search(r"^\s*::", escaped, re.MULTILINE)
    assert not re.search(r"##(\[|vso\[)", escaped)
    assert escaped.count("\n") == text.count("\n")


@EVERY
def test_json_reads_the_same_and_is_no_command(text: str) -> None:
    escaped = for_json(json.dumps({"name": text}))
    assert json.loads(escaped) == json.loads(json.dumps({"name": text}))
    assert escaped.isprintable()
    assert not re.search(r"##(\[|vso\[)", escaped)


@EVERY
def test_a_page_reads_one_element_with_the_text(text: str) -> None:
    for quote in "'\"":
        page = Reader(f"<p title={quote}{for_html(text)}{quote}>{for_html(text)}</p>")
        assert page.tags == [("p", {"title": one_line(text)})]
        assert page.text == one_line(text)


@EVERY
def test_lines_of_a_page_stay_lines(text: str) -> None:
    page = Reader(f"<pre>{for_html(text, lines=True)}</pre>")
    assert [tag for tag, _ in page.tags] == ["pre"]
    assert page.text.split("\n") == [one_line(line) for line in text.split("\n")]


@EVERY
def test_an_xml_reader_finds_the_text(text: str) -> None:
    for quote in "'\"":
        root = ET.fromstring(f"<a b={quote}{for_xml(text)}{quote}>{for_xml(text)}</a>")
        assert (root.text or "") == one_line(text)
        assert root.attrib == {"b": one_line(text)}
        assert list(root) == []


@EVERY
def test_a_spreadsheet_reads_a_cell_and_no_formula(text: str) -> None:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(["first", for_csv(text), "last"])
    rows = list(csv.reader(io.StringIO(written.getvalue())))
    assert len(rows) == 1
    assert len(rows[0]) == 3
    cell = rows[0][1]
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠"))
    assert not cell.lstrip().startswith(("::", "##[", "##vso["))
    assert cell.removeprefix("'") == one_line(text).removeprefix("'")


@EVERY
def test_a_markdown_table_reads_one_cell_with_the_text(text: str) -> None:
    row = f"| first | {for_markdown(text)} | last |"
    assert len(row.splitlines()) == 1
    cells = cells_of(row)
    assert (len(cells), cells[0], cells[-1]) == (3, "first", "last")
    cell_text = one_line(text)
    cell_text = cell_text if len(cell_text) <= 300 else f"{cell_text[:150]}…{cell_text[-150:]}"
    assert markdown_text(cells[1]) == cell_text.strip()


@EVERY
def test_a_workflow_reads_one_command_with_the_text(text: str) -> None:
    command = f"::error title={for_workflow_property(text)}::{for_workflow(text)}"
    match = re.fullmatch(r"::error title=([^:,\r\n]*)::([^\r\n]*)", command)
    assert match is not None
    assert len(command.splitlines()) == 1
    codes = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}
    for part in match.groups():
        decoded = re.sub("%(?:0D|0A|3A|2C|25)", lambda code: codes[code[0]], part)
        assert decoded == one_line(text)


def test_numbers_in_a_spreadsheet_stay_numbers() -> None:
    values = [-1.5, 3, True, None, float("nan"), float("inf")]
    assert [for_csv(value) for value in values] == [-1.5, 3, "true", "", "", ""]


def test_it_needs_no_torch() -> None:
    code = "import sys, qgate.text; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shares_never_read_as_none_or_all() -> None:
    shares = (0, 1e-9, 0.004, 0.0951, 0.5, 0.995, 0.9996, 1, math.nan)
    assert [percent(share) for share in shares] == [
        "0 %", "1e-7 %", "0.4 %", "9.5 %", "50.0 %", "99.5 %", ">99.9 %", "100 %", "-"
    ]  # fmt: skip


def test_shares_of_labels_are_rounded_and_never_read_as_none_or_all() -> None:
    shares = (0, 1e-9, 0.004, 0.0951, 0.5, 0.995, 0.9996, 1)
    assert [rounded_percent(share) for share in shares] == [
        "0 %", "<0.1 %", "0.4 %", "9.5 %", "50 %", "99.5 %", ">99.9 %", "100 %"
    ]  # fmt: skip
