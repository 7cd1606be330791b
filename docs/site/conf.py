"""Sphinx's settings. `build.py` puts the pages together and runs it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import qgate

project = "qgate"
author = "The qgate authors"
copyright = author
version = release = qgate.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"qgate {release}"
html_static_path = ["_static"]
html_css_files = ["qgate.css"]
html_extra_path = ["_extra"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
exclude_patterns = ["_*"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "code"
autodoc_typehints = "none"
# What is shown beside code is text as often as not.
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]


def as_text(lines: list[str]) -> list[str]:
    """Turn a docstring, plain text with backticks, into the markup that autodoc reads."""
    lines_out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        whole = paragraph.splitlines()
        if rows := _rows(whole):
            for name, text in rows:
                lines_out += [f"``{name}``", f"    {_marked(text)}"]
            lines_out.append("")
        elif any(re.match(r"\s", line) or re.search(r"\S {2,}\S", line) for line in whole):
            lines_out += ["::", "", *(f"    {line}" for line in whole), ""]
        elif whole:
            lines_out += [*map(_marked, whole), ""]
    return lines_out


def _rows(paragraph: list[str]) -> list[tuple[str, str]]:
    """Read a table of names and what they are; empty if the paragraph is something else."""
    rows: list[tuple[str, str]] = []
    for line in paragraph:
        if row := re.fullmatch(r"(\S+(?:, \S+)*) {2,}(\S.*)|(\w+) (\S.*)", line):
            if row[3] and not rows:
                return []
            rows.append((row[1] or row[3], row[2] or row[4]))
        elif rows and line.startswith("    "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return []
    return rows


def _marked(line: str) -> str:
    """Escape what is markup for Sphinx and not for people."""
    marked = re.sub(r"`([^`]+)`", "\0\\1\0", line)
    marked = re.sub(r"([*\\|_])", r"\\\1", marked)
    return re.sub("\0([^\0]*)\0", _code, marked).replace("\0", "")


def _code(match: re.Match[str]) -> str:
    return "``" + re.sub(r"\\([*\\|_])", r"\1", match[1]) + "``"


def _process(_app: Any, what: str, _name: str, obj: Any, _options: Any, lines: list[str]) -> None:
    if what == "data" and type(obj).__module__ in ("builtins", "types", "typing"):
        # What Python says of all tuples and unions says nothing of this one.
        general = inspect.getdoc(type(obj)) or ""
        if [line.strip() for line in lines if line.strip()] == _lines(general):
            lines[:] = [f"`{obj!r}`"] if len(repr(obj)) < 200 else []
    lines[:] = as_text(lines)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _process)
