"""A disk that is full: each gate is held, what cannot be written is said, and nothing is green."""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path

import pytest

from tests.campaigns.forked import Ended, ran
from tests.plugin.conftest import SHORT
from tests.plugin.projects import tightened
from tests.shares import share, slow_file

pytestmark = slow_file


def run_with(size: int, folder: Path, *options: str) -> Ended:
    """Run the suites where no file can be larger than `size` bytes, as on a disk without room."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    words = ["suites", *SHORT, "--mode=int8", "--model=tiny-llama", "--capture=sys", *options]
    return ran(lambda: int(pytest.main(words)), folder, limit)


@share(3)
@pytest.mark.parametrize("size", [0, 10_000, 400_000])
@pytest.mark.parametrize("is_red", [False, True], ids=["green", "red"])
def test_every_gate_is_held_and_nothing_is_green(size: int, is_red: bool, project: Path) -> None:
    if is_red:
        tightened(project)
    out = project / "qgate-out"
    out.mkdir()
    for name in ("results.jsonl", "results.csv", "report.html"):
        (out / name).write_text("earlier")
    ended = run_with(size, project)
    assert "INTERNALERROR" not in ended.said
    assert "Traceback" not in ended.said
    assert ended.status == pytest.ExitCode.TESTS_FAILED
    expected = "1 failed, 5 passed" if is_red else "6 passed"
    assert re.search(rf"{expected} in", ended.said)
    assert re.search(r"ERROR: .*'.*File too large; raise the limit", ended.said)
    assert "[Errno" not in ended.said
    file_names = [path.name for path in out.glob("*") if path.is_file()]
    assert "earlier" not in [(out / name).read_text()[:7] for name in file_names], "of another run"
    assert "report.html" not in file_names
