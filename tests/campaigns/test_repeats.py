"""Repeated runs name the tests that are red at times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.repeats import delicate_files, main
from tests.shares import proof

_AT_TIMES = """
from pathlib import Path

def test_right():
    pass

def test_red_at_times():
    times = Path(__file__).with_name("times")
    times.write_text(times.read_text() + "x" if times.exists() else "x")
    assert times.read_text() != "xx"
"""


@proof
def test_a_test_that_is_red_at_times_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_at_times.py"
    path.write_text(_AT_TIMES)
    (tmp_path / "conftest.py").write_text(
        "from tests.shares import pytest_addoption as pytest_addoption"
    )
    assert main(["--count", "2", "--beside", "0", str(path)]) == 1
    first, *lines = capfd.readouterr().out.splitlines()
    assert first == "1 file"
    assert [line.rpartition(", ")[2] for line in lines[:2]] == ["0 red", "1 red"]
    assert lines[2].startswith("red 1 of 2 times: ")
    assert lines[2].endswith("test_at_times.py::test_red_at_times")


def test_files_that_start_processes_or_ask_servers_are_repeated() -> None:
    files = {*delicate_files()}
    assert {"tests/engine/test_running.py", "tests/dumps/test_url_dumps.py"} <= files
    assert "tests/metrics/test_error_metrics.py" not in files
