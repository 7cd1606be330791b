"""Faults of a device, on the simulated one; `python -m tests.devices cuda --faults` is the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import faults
from tests.devices.cases import Setting
from tests.devices.journal import Journal
from tests.shares import always, share, slow_file

pytestmark = slow_file


def setting_in(folder: Path) -> Setting:
    return Setting("sim", 1, folder, Journal(folder / "journal.jsonl"))


NAMES = list(faults.cases(setting_in(Path())))


@pytest.fixture(autouse=True)
def without_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a device's report are not those of a service of CI."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@share(14)
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_sentence_and_nothing_is_torn(tmp_path: Path, name: str) -> None:
    setting = setting_in(tmp_path)
    assert faults.cases(setting)[name](setting) == ""


@always
def test_raw_output_and_torn_files_are_seen(tmp_path: Path) -> None:
    traceback = faults.Ended(1, "Traceback (most recent call last)")
    assert faults._wrong(traceback, 0, "7 passed").startswith(
        "status 1, not 0, no '7 passed', Traceback"
    )
    (tmp_path / "qgate-out").mkdir()
    (tmp_path / "qgate-out" / "results.jsonl").write_text('{"a": 1}\n{"b')
    assert "results.jsonl is torn" in faults._torn(setting_in(tmp_path), tmp_path)
