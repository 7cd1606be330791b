"""Every way to add something that CONTRIBUTING.md shows is one that works."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests import readme
from tests.campaigns.forked import ran

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = {
    block.heading.split(" ", 2)[2]: block
    for block in readme.blocks(TEXT)
    if block.heading.startswith("Add ")
}
THINGS = (
    "format",
    "metric",
    "scope, or a kind of limit",
    "mode",
    "model",
    "plot",
    "picture of a gate",
    "suite",
    "command",
    "setting",
    "exhibit",
    "known arithmetic",
)


def added(block: readme.Block) -> int:
    readme.run_python(block)
    return 0


@pytest.mark.parametrize("thing", THINGS)
def test_what_is_added_as_the_page_shows_is_there(thing: str, tmp_path: Path) -> None:
    ended = ran(functools.partial(added, BLOCKS[thing]), tmp_path)
    assert ended.status == 0, ended.said


def test_each_thing_has_a_section() -> None:
    assert list(BLOCKS) == list(THINGS)


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"`((?:qgate|tests|suites|docs)/[\w./]+)`", TEXT)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
