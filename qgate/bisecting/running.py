"""Run the gates of a commit in its worktree, and read what became of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files as packaged
from pathlib import Path
from typing import Any

from qgate.bisecting.record import CommitCause, CommitName, CommitRun
from qgate.bisecting.worktree import OwnWorktree
from qgate.errors import QgateError
from qgate.results import Tally, read
from qgate.results.schema import is_counted
from qgate.results.summary import is_unknown
from qgate.storage.git import without_outer_git
from qgate.storage.out_folders import OUT
from qgate.storage.removing import LinkError, refuse_links, remove_files
from qgate.text import one_line

_RECORDER = "qgate_bisect_recorder"
_RESULTS = "results.jsonl"
_BASELINES = "baselines"
# What a run of pytest that judged something ends with: all passed, some failed.
_JUDGED = (0, 1)
_OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", _RECORDER, "--qgate-allow-partial",
            "--qgate-no-report", "--qgate-plots=none")  # fmt: skip


class CommitGates:
    """The gates of commits, all held against the accepted files of the first one that is run."""

    def __init__(
        self, worktree: OwnWorktree, suites: Sequence[str], options: Sequence[str]
    ) -> None:
        self._worktree = worktree
        self._suites = [*suites]
        self._options = [*options]
        self._accepted: list[str] | None = None
        source = packaged("qgate") / "starter" / "bisect_recorder.py.txt"
        recorder = worktree.around / f"{_RECORDER}.py"
        recorder.write_bytes(source.read_bytes())

    def run(self, name: CommitName) -> CommitRun:
        """Run the gates of a commit."""
        tree = self._worktree
        tree.check_out(name.commit)
        missing = [path for path in self._suites if not (tree.folder / _file(path)).exists()]
        if missing:
            return CommitRun(name, reason=f"there is no {missing[0]!r}")
        try:
            remove_files(tree.around, *(file.name for file in tree.around.glob("record-*.json")))
            for folder in tree.root.rglob(OUT):
                refuse_links(tree.root, str(folder.relative_to(tree.root)))
                remove_files(folder, _RESULTS)
        except LinkError as error:
            return CommitRun(name, reason=str(error))
        accepted = self._accepted or []
        command = ["-m", "pytest", *_OPTIONS, *accepted, *self._options, *self._suites]
        status, output = run_python(command, tree.folder, self._environment())
        records = [json.loads(file.read_bytes()) for file in tree.around.glob("record-*.json")]
        _check_imports(records, tree)
        main = next((record for record in records if record["outcomes"]), None)
        if status not in _JUDGED or main is None:
            return CommitRun(name, reason=_reason(records, status, output))
        if self._accepted is None:
            self._accepted = self._kept_baselines(main["baselines"])
        results = sorted(tree.root.rglob(f"{OUT}/{_RESULTS}"))
        return _commit_run(name, main["outcomes"], results)

    def _environment(self) -> dict[str, str]:
        """Return an environment in which the code of the worktree stands for that of the clone.

        Compiled files would be stale: commits of the same second have files of the same size.
        """
        paths = [str(self._worktree.around), *self._project_paths()]
        paths += filter(None, [os.environ.get("PYTHONPATH", "")])
        return {
            **without_outer_git(),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _project_paths(self) -> list[str]:
        """Return the folders of the worktree for those of the clone that Python imports from."""
        root = self._worktree.repository.root
        folders = [*sys.path, *_editable_folders()]
        inside = [Path(folder).resolve() for folder in folders if folder]
        return [
            str(self._worktree.root / folder.relative_to(root))
            for folder in dict.fromkeys(inside)
            if folder.is_relative_to(root) and not _is_installed(folder)
        ]

    def _kept_baselines(self, location: str | None) -> list[str]:
        """Keep the accepted files of this commit for all others; a bucket is used as it is."""
        if location is None:
            return []
        folder = Path(location)
        if not folder.resolve().is_relative_to(self._worktree.root):
            return [f"--qgate-baselines={location}"]
        baselines_copy = self._worktree.around / _BASELINES
        if folder.is_dir():
            shutil.copytree(folder, baselines_copy)
        return [f"--qgate-baselines={baselines_copy}"]


def run_python(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run Python in a process of its own; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _file(path: str) -> str:
    return path.partition("::")[0]


def _editable_folders() -> Iterator[str]:
    """Yield the folders of packages that setuptools installed as links to their sources."""
    for name, module in [*sys.modules.items()]:
        mapping = getattr(module, "MAPPING", None)
        if name.startswith("__editable___") and isinstance(mapping, dict):
            yield from (str(Path(folder).parent) for folder in mapping.values())


def _is_installed(path: Path) -> bool:
    """Tell if a file is of an environment, which may lie in the clone, and not of the project."""
    return path.is_relative_to(Path(sys.prefix).resolve()) or "site-packages" in path.parts


def _check_imports(records: Sequence[Mapping[str, Any]], tree: OwnWorktree) -> None:
    """Refuse verdicts about code of the clone: every commit would have the same one."""
    root = tree.repository.root
    for record in records:
        for file in map(Path, record["imported"]):
            if file.is_relative_to(root) and not _is_installed(file):
                raise QgateError(
                    f"a run imported {str(file.relative_to(root))!r} of your checkout and not of "
                    f"the commit: set PYTHONPATH to the folder {str(root)!r} or the one in it that "
                    "your code is imported from."
                )


def _reason(records: Sequence[Mapping[str, Any]], status: int, output: str) -> str:
    """Say why a run judged nothing: the first error, else the last line that pytest printed."""
    errors = [error for record in records for error in record["errors"]]
    broken = [
        (gate, line)
        for record in records
        for gate, (state, line) in record["outcomes"].items()
        if state == "broken"
    ]
    for node, text in (*errors, *broken):
        return one_line(f"{node}: {text}")
    if status < 0:
        return f"killed by signal {-status}"
    lines = [line for line in output.strip().splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("ERROR", "E  ", "qgate:"))]
    line = (marked or lines[-1:] or [f"pytest printed nothing and ended with {status}"])[0]
    return one_line(line.removeprefix("ERROR: ").removeprefix("qgate: "))


def _commit_run(
    name: CommitName, outcomes: Mapping[str, Sequence[str]], results: Sequence[Path]
) -> CommitRun:
    """Judge every test: one that only lacks accepted values is new and not red."""
    tally, unaccepted = Tally(), set()
    for record in (record for file in results for record in read(file)[1]):
        tally.add(record)
        if is_counted(record) and not record["passed"] and is_unknown(record):
            unaccepted.add(str(record["node"]))
    causes = [
        (
            CommitCause(cause.text(), cause.suspect.site, cause.suspect.model, cause.suspect.mode),
            frozenset(cause.gates),
        )
        for cause in tally.causes
    ]
    caused = frozenset().union(*(of for _, of in causes))
    gates = {}
    for node, (state, line) in outcomes.items():
        if state == "passed":
            gates[node] = "green"
        elif state == "failed":
            is_new = node in unaccepted and node not in caused
            gates[node] = "new" if is_new else "red"
            if not (is_new or node in caused):
                causes.append((CommitCause(f"{node}: {line}", "", "", ""), frozenset([node])))
    if not gates:
        broken = next((f"{node}: {line}" for node, (_, line) in outcomes.items() if line), "")
        return CommitRun(name, reason=one_line(broken or "every test was skipped"))
    return CommitRun(name, gates, causes)
