"""Sphinx's settings. `build.py` puts the pages together and runs it."""

from __future__ import annotations

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
        if any(re.match(r"\s", line) or re.search(r"\S {2,}\S", line) for line in whole):
            lines_out += ["::", "", *(f"    {line}" for line in whole), ""]
        elif whole:
            marked = [re.sub(r"`([^`]+)`", "\0\\1\0", line) for line in whole]
            marked = [re.sub(r"([*\\|_])", r"\\\1", line) for line in marked]
            plain = [re.sub("\0([^\0]*)\0", _code, line) for line in marked]
            lines_out += [*(line.replace("\0", "") for line in plain), ""]
    return lines_out


def _code(match: re.Match[str]) -> str:
    return "``" + re.sub(r"\\([*\\|_])", r"\1", match[1]) + "``"


def _process(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = as_text(lines)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _process)
