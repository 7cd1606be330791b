"""Print texts of commands: names in them are other people's, and no terminal obeys them."""

from __future__ import annotations

from typing import IO

from qgate.text.escaping import for_json, for_terminal, one_line


def print_line(text: object = "", *, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print a text as one line; ends of lines in it become escapes."""
    print(for_terminal(one_line(text)), file=file, flush=flush)


def print_text(text: object, *, end: str = "\n", file: IO[str] | None = None) -> None:
    """Print a text of any number of lines; ends of lines in names are escaped before."""
    print(for_terminal(text), end=end, file=file)


def print_json(text: str, *, end: str = "\n") -> None:
    """Print JSON, with escapes in the place of what a terminal or a log of CI obeys."""
    print(for_json(text), end=end)
