"""A small language from a seeded generator: text to train and to run the tiny models on.

A document comes back to a few subjects. Each of its lines is a sentence whose endings agree, a sum,
words in nested brackets, a quotation that later lines copy, or a list that is counted and read
backwards: the next byte depends on the last ones and on bytes hundreds of places before.

Every line belongs to one part by its checksum, so no line of one part is ever one of another. Only
`random.Random.random` is drawn from, which Python promises to keep: the bytes are the same on every
machine and version.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

from qgate.errors import QgateError

Part = Literal["training", "evaluation", "calibration"]

# Remainders of a line's CRC-32 by four.
_REMAINDERS: dict[Part, tuple[int, ...]] = {
    "training": (0, 1),
    "evaluation": (2,),
    "calibration": (3,),
}
_MOST = 2**26
_ONSETS = [*list("bdfgklmnprstvz"), "br", "dr", "kl", "pl", "st", "tr"]
_VOWELS = list("aeiou")
_CODAS = ["", "", "", *list("nrls")]
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
_ENDINGS = "aoe"  # of the three classes a noun can have; what belongs to it ends alike
_JOINS = ("and", "but", "so", "while")

Draw = Callable[[], float]
Item = TypeVar("Item")


def text(part: Part, size: int, seed: int = 0) -> str:
    """Return the first `size` characters of a part, all of them ASCII.

    A longer text begins with the shorter one; another seed gives other documents.
    """
    if part not in _REMAINDERS:
        raise QgateError(f"part {part!r} does not exist; one of {', '.join(_REMAINDERS)}.")
    if not 0 <= size <= _MOST:
        raise QgateError(
            f"{size} characters of the built-in language are not allowed; it gives up to {_MOST}. "
            "Ask for fewer or shorter samples, or give a text of your own."
        )
    room = 4096
    while room < size:
        room *= 2
    return _beginning(part, room, seed)[:size]


@lru_cache(maxsize=8)
def _beginning(part: Part, size: int, seed: int) -> str:
    written: list[str] = []
    length = 0
    for line in lines(part, seed):
        written.append(line)
        length += len(line) + 1
        if length >= size:
            break
    return "\n".join(written) + "\n"


def lines(part: Part, seed: int = 0) -> Iterator[str]:
    """Generate the lines of a part without end; an empty one stands between documents."""
    draw = random.Random(seed * len(_REMAINDERS) + list(_REMAINDERS).index(part)).random
    allowed = _REMAINDERS[part]
    while True:
        document = _Document(draw)
        for make in document.plan():
            line = make()
            while zlib.crc32(line.encode()) % 4 not in allowed:
                line = make()
            document.remember(line)
            yield line
        yield ""


class _Document:
    """A document: its subjects, and the quotations of its lines so far."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._nouns = self._several(_NOUNS, 6)
        self._verbs = self._several(_STEMS, 4)
        self._adjectives = self._several(_STEMS, 4)
        self._quoted: list[str] = []
        self._latest = ""

    def plan(self) -> list[Callable[[], str]]:
        """Return the makers of its lines: the title, then lines of every kind in some order."""
        kinds = (
            *(self._sentence,) * 7,
            *(self._sum,) * 3,
            *(self._brackets,) * 2,
            *(self._quotation,) * 4,
            *(self._list,) * 2,
        )
        count = 8 + int(self._draw() * 24)
        return [self._title, *(self._one(kinds) for _ in range(count))]

    def remember(self, line: str) -> None:
        """Add a line to the document: later lines can copy its quotation."""
        if self._latest and self._latest in line:
            self._quoted.append(self._latest)
        self._latest = ""

    def _title(self) -> str:
        return f"# {self._nouns[0]} {int(self._draw() * 10000)}"

    def _sentence(self) -> str:
        clauses = [self._clause()]
        while self._draw() < 0.35 and len(clauses) < 3:
            clauses.append(f"{self._one(_JOINS)} {self._clause()}")
        return ", ".join(clauses) + "."

    def _clause(self) -> str:
        """Make a clause whose article, adjective and verb end like their noun."""
        subject = self._noun()
        verb = self._verb() + "t" + subject[-1]
        return f"{self._phrase(subject)} {verb} {self._phrase(self._noun())}"

    def _phrase(self, noun: str) -> str:
        ending = noun[-1]
        if self._draw() < 0.4:
            return f"l{ending} {self._adjective()}{ending} {noun}"
        return f"l{ending} {noun}"

    def _sum(self) -> str:
        high = 100 if self._draw() < 0.7 else 1000
        terms = [int(self._draw() * high) for _ in range(2 + int(self._draw() * 1.5))]
        if len(terms) == 2 and self._draw() < 0.3:
            low, top = sorted(terms)
            return f"{top} - {low} = {top - low}."
        return f"{' + '.join(map(str, terms))} = {sum(terms)}."

    def _brackets(self, depth: int = 0) -> str:
        opening, closing = self._one(_BRACKETS)
        parts = []
        for _ in range(1 + int(self._draw() * 3)):
            if depth < 4 and self._draw() < 0.5:
                parts.append(self._brackets(depth + 1))
            else:
                parts.append(self._noun())
        return f"{opening}{' '.join(parts)}{closing}"

    def _quotation(self) -> str:
        """Quote new words, or one of the last three quotations again."""
        speaker = self._noun()
        if self._quoted and self._draw() < 0.7:
            return f'l{speaker[-1]} {speaker} again: "{self._one(self._quoted[-3:])}".'
        words = " ".join(self._one(_STEMS) for _ in range(3 + int(self._draw() * 4)))
        self._latest = words
        return f'l{speaker[-1]} {speaker} says: "{words}".'

    def _list(self) -> str:
        items = [self._one(_NOUNS) for _ in range(3 + int(self._draw() * 4))]
        back = ", ".join(reversed(items))
        return f"list: {', '.join(items)}; {len(items)} of them; back: {back}."

    def _noun(self) -> str:
        return self._one(self._nouns) if self._draw() < 0.8 else self._common(_NOUNS)

    def _verb(self) -> str:
        return self._one(self._verbs) if self._draw() < 0.7 else self._common(_STEMS)

    def _adjective(self) -> str:
        return self._one(self._adjectives) if self._draw() < 0.7 else self._common(_STEMS)

    def _one(self, items: Sequence[Item]) -> Item:
        return items[int(self._draw() * len(items))]

    def _common(self, words: Sequence[str]) -> str:
        """Draw a word of the whole language, the first ones far more often than the last."""
        position = self._draw()
        return words[int(position * position * position * len(words))]

    def _several(self, words: Sequence[str], count: int) -> list[str]:
        return [self._common(words) for _ in range(count)]


def _stems(count: int) -> list[str]:
    """Make words of one or two syllables, the same ones each time."""
    draw = random.Random(7).random
    stems: dict[str, None] = {}
    while len(stems) < count:
        syllables = [
            "".join(part[int(draw() * len(part))] for part in (_ONSETS, _VOWELS, _CODAS))
            for _ in range(1 + int(draw() * 1.6))
        ]
        stems["".join(syllables)] = None
    return list(stems)


_STEMS = _stems(400)
_NOUNS = [stem + _ENDINGS[at % 3] for at, stem in enumerate(_stems(900)[400:])]
