"""The files that a failing gate runs through, from its judgement to what is printed and written.

python -m tests.plugin.test_failure_path    print them, with functions and how often each is called

A run with one red gate writes the terminal, JUnit and the page; from `GateSession.judge` on each
function that is called is noted. What collects and what measures is not on that way, nor is what
an import runs.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest

import qgate
from tests.campaigns.forked import ran
from tests.plugin.test_failure_page import MODEL

MOST_FILES = 30
"""Files that a failure may run through; the number only falls."""
SUITE = Path(__file__).parents[2] / "suites" / "test_layer_outputs.py"
ROOMS = ("gate/", "results/", "page/", "charts/", "plugin/", "text")
BESIDE = (
    "plugin/gate_collection.py",
    *(f"gate/{folder}/" for folder in ("measuring", "modules", "segments", "serving")),
)
"""What collects and what measures."""
WRITTEN = ("qgate-out/results.jsonl", "qgate-out/report.html", "junit.xml")
OPTIONS = ("-q", "-p", "no:cacheprovider", "--model=net.py:build", "--mode=ours", "suites")


class Way:
    """Counts calls of functions of qgate, as a profile function, once a gate is judged."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._root = f"{Path(qgate.__file__).parent.as_posix()}/"
        self._imports, self._judged = 0, False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "_find_and_load" and "importlib" in code.co_filename:
            self._imports += 1 if event == "call" else -1
        elif event == "call" and not self._imports and code.co_filename.startswith(self._root):
            file = code.co_filename.removeprefix(self._root)
            self._judged = self._judged or code.co_qualname == "GateSession.judge"
            is_function = file.endswith(".py") and not code.co_name.startswith("<")
            on_way = file.startswith(ROOMS) and not file.startswith(BESIDE)
            if self._judged and is_function and on_way:
                self.calls[f"{file}:{code.co_qualname}"] += 1


def traced(words: Sequence[str]) -> int:
    """Run pytest, print what it called, and return its status."""
    way = Way()
    sys.setprofile(way)
    status = int(pytest.main([*words]))
    sys.setprofile(None)
    print(f"\nentered {json.dumps(way.calls)}")
    return status


def calls_of_a_failure(project: Path) -> dict[str, int]:
    """Return how often each function is called, by file and name, in an empty project."""
    (project / "suites").mkdir()
    shutil.copy(SUITE, project / "suites")
    (project / "net.py").write_text(MODEL, encoding="utf-8")
    accepted = ran(lambda: int(pytest.main([*OPTIONS, "--update-baselines"])), project)
    assert accepted.status == 0, accepted.said
    (project / "fault").write_text("half", encoding="utf-8")
    failed = ran(lambda: traced([*OPTIONS, "--junitxml=junit.xml"]), project)
    assert failed.status == 1, failed.said
    assert "1 of 1 gate failed" in failed.said, failed.said
    assert all((project / name).is_file() for name in WRITTEN)
    line = next(line for line in failed.said.splitlines() if line.startswith("entered "))
    calls: dict[str, int] = json.loads(line.removeprefix("entered "))
    return calls


def files_of(calls: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the functions of each file and their calls, most calls first."""
    files: dict[str, dict[str, int]] = {}
    for location, count in sorted(calls.items(), key=lambda entry: (-entry[1], entry[0])):
        file, _, name = location.partition(":")
        files.setdefault(file, {})[name] = count
    return dict(sorted(files.items()))


def test_a_failure_runs_through_few_files(tmp_path: Path) -> None:
    files = files_of(calls_of_a_failure(tmp_path))
    starts = {"gate/sessions.py", "plugin/summary.py", "page/pages.py", "results/failure_causes.py"}
    assert starts <= files.keys()
    assert len(files) <= MOST_FILES, f"{len(files)}: {[*files]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(calls_of_a_failure(Path(folder)))
    for file, functions in files.items():
        print(f"{file}: {sum(functions.values()):,} calls")
        print(*(f"{count:9,}  {name}" for name, count in functions.items()), sep="\n")
    print(f"{len(files)} files from judge to terminal, JUnit and page")
