"""Every reader of the house is fuzzed, and every target passes through the readers it names."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.campaigns.fuzzing.table import NOT_READERS, TARGETS, readers
from tests.campaigns.fuzzing.target import run_files, seeds_of
from tests.shares import share

PACKAGE = Path(__file__).parents[3] / "qgate"


def test_every_reader_is_in_the_table() -> None:
    """One that is new has to become a target, or to have a reason."""
    reader_names = readers(PACKAGE)
    named = {reader for target in TARGETS.values() for reader in target.readers}
    assert sorted(reader_names - named - NOT_READERS.keys()) == []
    assert sorted(NOT_READERS.keys() - reader_names) == [], "a reason for what reads no more"
    assert sorted(named & NOT_READERS.keys()) == []


def test_a_reader_that_nobody_knows_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "qgate"
    (package / "dumps").mkdir(parents=True)
    (package / "dumps" / "more.py").write_text(
        "import json\n\ndef new(path):\n    return json.loads(path.read_text())\n\n"
        "def wrote(path):\n    path.open('w').write('')\n\ndef deep(path):\n"
        "    def inner():\n        return open(path)\n    return inner\n"
    )
    assert readers(package) == {"qgate.dumps.more:new", "qgate.dumps.more:deep"}


@share(4)
@pytest.mark.parametrize("name", TARGETS)
def test_good_files_are_read_by_the_readers_that_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = TARGETS[name]
    files = seeds_of(target)
    callers: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("qgate."):
                callers.add(f"{module}:{frame.f_code.co_name}")

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        outcome = run_files(target, files, tmp_path, seconds=120.0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if not target.is_text:
        assert outcome.said == ""
    assert outcome.wrong == "" or outcome.wrong.startswith("took "), (
        "libraries are loaded the first time"
    )
    assert set(target.readers) <= callers
