"""Tables of Markdown, as pages made by code have them."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table without padding: cells hold whole sentences."""
    rule = "|".join(["---"] * len(headings))
    rows = [" | ".join(line) for line in [headings, *lines]]
    return "\n".join([f"| {rows[0]} |", f"|{rule}|", *(f"| {line} |" for line in rows[1:])])
