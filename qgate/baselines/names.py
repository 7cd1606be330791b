"""Names as people choose them, made fit for file names and for columns of text."""

from __future__ import annotations

import hashlib
import re

_PLAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}(?<!\.)")
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")


def safe_name(name: str) -> str:
    """Return a file name that no other name gets, readable where it can be.

    A plain name in lower case is its own file name. Any other one gets a readable part, `~`, which
    plain names do not have, and a hash: `A` and `a` stay apart where file names ignore case.
    """
    if _PLAIN.fullmatch(name) and not _DEVICES.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{readable}~{digest[:16]}"


def quoted(text: str) -> str:
    """Write a text as one word of a line: blanks and unprintable characters are escaped."""
    if not text:
        return "%"
    word = text
    if not text.isprintable() or " " in text or "%" in text:
        word = "".join(
            "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))
            if c in " %" or not c.isprintable()
            else c
            for c in text
        )
    # No line of a file is a comment, or a command to the log of CI that shows it.
    is_live = word.startswith(("#", "::"))
    return f"%{ord(word[0]):02X}{word[1:]}" if is_live else word


def unquoted(word: str) -> str:
    """Return the text of a word; a ValueError for a word that `quoted` does not make."""
    raw = b""
    for index, part in enumerate(_ESCAPE.split("" if word == "%" else word)):
        raw += bytes([int(part, 16)]) if index % 2 else part.encode("utf-8", "surrogatepass")
    text = raw.decode("utf-8", "surrogatepass")
    if quoted(text) != word:
        raise ValueError(f"{word!r} is not how qgate writes a name")
    return text
