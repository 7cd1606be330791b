"""Gates of another commit against the code of this checkout: `qgate run --gate-from REF`.

A pull request cannot silence gates whose suites, settings and baselines are those of its base. Two
trees are made of links: the base commit as it is, whose collected gates have to run, and this
checkout with the gates of the base, which runs them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from qgate.documents import toml
from qgate.errors import QgateError
from qgate.results import read
from qgate.storage.files import scratch_folder
from qgate.storage.git import GitRepository
from qgate.text import counted, listed
from qgate.text.printing import print_line

_SETTINGS = {
    "conftest.py", "pyproject.toml", "qgate.toml", "pytest.toml", ".pytest.toml", "pytest.ini",
    ".pytest.ini", "tox.ini", "setup.cfg",
}  # fmt: skip
"""Files at any depth that decide which tests run, and how strict they are."""
_HIDING = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
_UPDATES = ("--update", "--qgate-update")
_OUT, _SHOWN = "qgate-out", 5
_COMPILED = "__pycache__"
"""Never shared: Python takes compiled code for a file of the same size and second."""


def run_gates_from(reference: str, words: Sequence[str], here: Path) -> int:
    """Run the gates of a commit, and fail where one of them went missing.

    words   what pytest is called with: suites first, then its options
    """
    if update := next((word for word in words if word.startswith(_UPDATES)), None):
        raise QgateError(f"{update} and --gate-from: a run with other gates accepts nothing.")
    repository = GitRepository.around(here)
    root, inside = repository.root, repository.folder.relative_to(repository.root)
    try:
        commit = repository.commit_of(reference)
    except QgateError:
        raise QgateError(
            f"--gate-from {reference!r} is no commit of this clone: fetch it first, as in `git "
            "fetch origin main`, and name origin/main."
        ) from None
    tests = [*words] if words and not words[0].startswith("-") else ["suites", *words]
    with scratch_folder() as scratch:
        base, mixed = scratch / "base", scratch / "mixed"
        _unpack(repository, commit, base)
        _link_ignored(repository, base)
        gates = _gate_files(repository, commit, inside, tests)
        _overlay(root, base, mixed, gates)
        planned = _planned(base / inside, tests, scratch)
        status = _pytest(mixed / inside, tests)
        held_nodes = _held(mixed / inside / _OUT / "results.jsonl")
        _keep_results(mixed / inside / _OUT, here / _OUT)
    missing = [node for node in planned if node not in held_nodes]
    count = f"{len(planned) - len(missing)} of {len(planned)}"
    print_line(f"gates of {reference} ({commit[:12]}): {count} held")
    if not missing:
        return status
    print_line(
        f"{counted(len(missing), 'gate')} of {reference} went missing: {listed(missing, _SHOWN)}. "
        "If they are meant to go, remove them in a pull request that is reviewed for that.",
        file=sys.stderr,
    )
    return status or 1


def _unpack(repository: GitRepository, commit: str, target: Path) -> None:
    file = target.with_suffix(".tar")
    repository.run("archive", "--output", str(file), commit, folder=repository.root)
    with tarfile.open(file) as archive:
        archive.extractall(target, filter="data")


def _link_ignored(repository: GitRepository, base: Path) -> None:
    """Link what git ignores, such as built extensions, where the commit has nothing."""
    ignored = "--others", "--ignored", "--exclude-standard", "--directory"
    for name in repository.names("ls-files", "-z", *ignored):
        target = base / name.rstrip("/")
        is_left = PurePosixPath(name).name.startswith((_OUT, _COMPILED))
        if not is_left and target.parent.is_dir() and not os.path.lexists(target):
            target.symlink_to(repository.root / name.rstrip("/"))


def _gate_files(
    repository: GitRepository, commit: str, inside: Path, tests: Sequence[str]
) -> set[str]:
    """List folders and files, of the commit or of this checkout, that are gates or settings."""
    named = itertools.takewhile(lambda word: not word.startswith("-"), tests)
    paths = [path for word in named if (path := word.partition("::")[0])]
    for file in ("qgate.toml", "pyproject.toml"):
        with contextlib.suppress(QgateError):
            paths += _baselines_in(repository.text_at(commit, repository.folder / file))
    names = [_within(inside, path) for path in [*paths, "baselines"]]
    listed_files = repository.names("ls-tree", "-r", "-z", "--name-only", commit)
    listed_files += repository.names("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    settings_files = {name for name in listed_files if PurePosixPath(name).name in _SETTINGS}
    return {name for name in names if name} | settings_files


def _baselines_in(settings: str) -> list[str]:
    """Return the folder of baselines that a file of settings names."""
    try:
        table: Any = toml(settings)
    except ValueError:
        return []  # pytest says what is wrong with it
    table = table["tool"].get("qgate", {}) if "tool" in table else table
    return [table["baselines"]] if isinstance(table.get("baselines"), str) else []


def _within(inside: Path, path: str) -> str:
    """Return a path below the repository, empty for one that is elsewhere or a URL."""
    if "://" in path or Path(path).is_absolute():
        return ""
    name = os.path.normpath(inside / path)
    return "" if name.startswith("..") else Path(name).as_posix()


def _overlay(root: Path, base: Path, target: Path, gates: set[str]) -> None:
    """Link this checkout into a folder, but for the gates, which are those of the base.

    A file in place of a folder of gates is left out, and so are settings that git does not list,
    as those behind a link to a folder.
    """
    opened = {str(parent) for name in gates for parent in PurePosixPath(name).parents}
    left_out = {".git", _COMPILED, *_SETTINGS}

    def link(name: str) -> None:
        for entry in sorted(os.listdir(root / name)):  # noqa: PTH208
            path = (PurePosixPath(name) / entry).as_posix()
            if path in gates or entry in left_out or entry.startswith(_OUT):
                continue
            if path not in opened:
                (target / path).symlink_to(root / path)
            elif (root / path).is_dir():
                (target / path).mkdir()
                link(path)

    target.mkdir()
    link("")
    for name in sorted(gates):
        source = base / name
        if not source.exists() or (target / name).exists():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / name, ignore_dangling_symlinks=True)
        else:
            shutil.copy2(source, target / name)


def _planned(folder: Path, tests: Sequence[str], scratch: Path) -> list[str]:
    """Return the gates that the base commit collects with its own code."""
    listing = scratch / "planned.json"
    more = ["-p", "qgate.plugin.gate_listing", "--qgate-list", str(listing), "--collect-only", "-q"]
    status = _pytest(folder, [*tests, *more], quiet=True)
    nodes: list[str] = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else []
    if status or not nodes:
        raise QgateError(
            f"the gates of the base cannot be collected (pytest ended with {status}): run `pytest "
            f"{' '.join(tests)} --collect-only` on the base branch."
        )
    return nodes


def _pytest(folder: Path, words: Iterable[str], *, quiet: bool = False) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in _HIDING}
    paths = [str(folder), *filter(None, [environment.get("PYTHONPATH", "")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider"]
    stream = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=stream, check=False
    ).returncode


def _held(results: Path) -> set[str]:
    """Return the gates that have a verdict."""
    if not results.exists():
        return set()
    _, records = read(results)
    return {str(row["node"]) for row in records if "xfailed" not in row}


def _keep_results(made: Path, target: Path) -> None:
    if made.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)
