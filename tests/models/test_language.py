import hashlib
import re
from collections.abc import Iterator

import pytest

from qgate.errors import QgateError
from qgate.models import language
from qgate.models.training import bigram_bits, unigram_bits

PARTS = ("training", "evaluation", "calibration")
SIZE = 2**17


def lines(part: language.Part, size: int = SIZE) -> list[str]:
    return language.text(part, size).split("\n")[:-1]


def matching(pattern: str) -> Iterator[re.Match[str]]:
    return re.finditer(pattern, language.text("evaluation", SIZE), re.MULTILINE)


@pytest.mark.parametrize(
    ("part", "digest"),
    [
        ("training", "6cf473867fb05d54"),
        ("evaluation", "0d577d4820d45806"),
        ("calibration", "b69ea90f9a951cac"),
    ],
)
def test_the_bytes_are_the_same_everywhere(part: language.Part, digest: str) -> None:
    text = language.text(part, SIZE).encode("ascii")
    assert len(text) == SIZE
    assert hashlib.sha256(text).hexdigest()[:16] == digest


@pytest.mark.parametrize("part", PARTS)
def test_a_longer_text_begins_with_the_shorter_one(part: language.Part) -> None:
    text = language.text(part, 10000)
    for size in (0, 1, 17, 4096, 4097):
        assert language.text(part, size) == text[:size]
    assert language.text(part, 10000, seed=1) != text


def test_parts_have_no_line_in_common() -> None:
    lines_by_part = {part: {line for line in lines(part) if line} for part in PARTS}
    assert min(map(len, lines_by_part.values())) > 2000
    assert not lines_by_part["training"] & lines_by_part["evaluation"]
    assert not lines_by_part["training"] & lines_by_part["calibration"]
    assert not lines_by_part["evaluation"] & lines_by_part["calibration"]


def test_sums_are_right() -> None:
    sums = [match[0] for match in matching(r"^[\d +-]+ = \d+\.$")]
    assert len(sums) > 200
    for line in sums:
        terms, right = line.rstrip(".").split(" = ")
        numbers = list(map(int, re.findall(r"\d+", terms)))
        expected = numbers[0] - numbers[1] if "-" in terms else sum(numbers)
        assert int(right) == expected, line


def test_brackets_close_in_order() -> None:
    bracketed = [match[0] for match in matching(r"^[\[({].*$")]
    deepest = 0
    for line in bracketed:
        open_ones: list[str] = []
        for letter in line:
            if letter in "([{":
                open_ones.append({"(": ")", "[": "]", "{": "}"}[letter])
                deepest = max(deepest, len(open_ones))
            elif letter in ")]}":
                assert open_ones.pop() == letter, line
        assert not open_ones
    assert len(bracketed) > 100
    assert deepest >= 4


def test_quotations_copy_what_their_document_said() -> None:
    copies, farthest = 0, 0
    for document in language.text("evaluation", SIZE).split("\n\n")[:-1]:
        for match in re.finditer(r'again: "([a-z ]+)"\.', document):
            copies += 1
            first = document.index(f'says: "{match[1]}".')
            assert first < match.start()
            farthest = max(farthest, match.start() - first)
    assert copies > 200
    assert farthest > 300


def test_lists_are_counted_and_read_backwards() -> None:
    lists = list(matching(r"^list: ([a-z, ]+); (\d+) of them; back: ([a-z, ]+)\.$"))
    assert len(lists) > 100
    for match in lists:
        items, back = match[1].split(", "), match[3].split(", ")
        assert items == back[::-1]
        assert len(items) == int(match[2])


def test_endings_agree() -> None:
    phrases = list(matching(r"\bl([aoe]) (?:([a-z]+) )?([a-z]+)(?= [a-z]+t[aoe]\b)"))
    assert len(phrases) > 300
    for match in phrases:
        assert match[3][-1] == match[1]
        assert match[2] is None or match[2][-1] == match[1]


def test_the_next_byte_depends_on_more_than_the_last_one() -> None:
    """zlib, which knows copies, needs fewer bits than pairs of bytes do."""
    import zlib

    train = language.text("training", 2**19).encode()
    held_out = language.text("evaluation", 2**16).encode()
    unigram = unigram_bits(train, held_out)
    bigram = bigram_bits(train, held_out)
    compressed = len(zlib.compress(held_out, 9)) * 8 / len(held_out)
    assert compressed < bigram < unigram


@pytest.mark.parametrize(
    ("part", "size", "words"),
    [
        ("test", 10, ["'test'", "training, evaluation, calibration"]),
        ("training", -1, ["-1 characters", "67108864"]),
        ("training", 2**26 + 1, ["67108865 characters", "fewer or shorter samples"]),
    ],
)
def test_what_the_language_cannot_give(part: str, size: int, words: list[str]) -> None:
    with pytest.raises(QgateError) as caught:
        language.text(part, size)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)
