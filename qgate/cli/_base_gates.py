"""Gates of another commit against the code of this checkout: `qgate run --gate-from REF`.

A pull request cannot silence gates whose suites, settings and baselines are those of its base. Two
trees are made of links: the base commit as it is, whose collected gates have to run, and this
checkout with the gates of the base, which runs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qgate.errors import QgateError
from qgate.project.settings import settings_above
from qgate.results import read
from qgate.storage.files import scratch_folder
from qgate.storage.git import GitRepository
from qgate.storage.out_folders import (
    CANDIDATES,
    OUT,
    REPRODUCTIONS,
    RUNNING,
    WRITTEN,
    check_out_folder,
    held_out_folder,
)
from qgate.storage.removing import clear, refuse_links, remove_files
from qgate.text import counted, listed
from qgate.text.printing import print_line

_SETTINGS = {
    "conftest.py", "pyproject.toml", "qgate.toml", "pytest.toml", ".pytest.toml", "pytest.ini",
    ".pytest.ini", "tox.ini", "setup.cfg",
}  # fmt: skip
"""Files at any depth that decide which tests run, and how strict they are."""
_HIDING = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
_UPDATES = ("--update", "--qgate-update")
_SHOWN = 5
_COMPILED = "__pycache__"
"""Never shared: Python takes compiled code for a file of the same size and second."""


@dataclass(frozen=True)
class BaseCollection:
    """Gates that the base collects with its own code, and what decides about them.

    gates      ids of its gates
    files      suites, baselines and files of settings, below the root of the repository
    elsewhere  those that are outside the tree of the base
    home       the folder of its results, below the root
    suite_folders  those among the files, and the folders of suites that are files
    """

    gates: Sequence[str]
    files: AbstractSet[str]
    elsewhere: Sequence[Path]
    home: Path
    suite_folders: Sequence[str]


def run_gates_from(reference: str, words: Sequence[str], here: Path) -> int:
    """Run the gates of a commit, and fail where one of them went missing.

    words   what pytest is called with: suites first, then its options
    """
    if update := next((word for word in words if word.startswith(_UPDATES)), None):
        raise QgateError(
            f"{update} cannot be used with --gate-from, which accepts nothing: leave out one of "
            "them."
        )
    repository = GitRepository.around(here)
    root, inside = repository.root, repository.folder.relative_to(repository.root)
    commit = commit_of_reference(repository, reference)
    with scratch_folder() as folder:
        scratch = folder.resolve()
        base, mixed = scratch / "base", scratch / "mixed"
        _unpack(repository, commit, base)
        _link_ignored(repository, base)
        tests = [*_suites(base / inside, words), *words]
        plan = _planned(base, inside, tests, reference)
        _refuse_paths_of(repository, plan, reference)
        gates = plan.files | _settings_files(repository, commit)
        _overlay(root, base, mixed, gates)
        with _out_folder(root, plan.home) as out:
            folders = [mixed / name for name in plan.suite_folders]
            status = _pytest(mixed / inside, tests, first=folders)
            _keep_results(mixed / plan.home / OUT, out)
        held_nodes = _held(mixed / plan.home / OUT / "results.jsonl")
    missing = [node for node in plan.gates if node not in held_nodes]
    count = f"{len(plan.gates) - len(missing)} of {len(plan.gates)}"
    print_line(f"gates of {reference} ({commit[:12]}): {count} held")
    if out.name != OUT:
        print_line(f"another run writes to {OUT}: the results of this one are in {out.name}")
    if not missing:
        return status
    has = "has" if len(missing) == 1 else "have"
    print_line(
        f"{counted(len(missing), 'gate')} of {reference} {has} no verdict: "
        f"{listed(missing, _SHOWN)}. The output of pytest says which were not collected, were "
        "skipped or expected to fail, or failed in their set-up. To remove gates on purpose, use a "
        "pull request that the owners of the gates review.",
        file=sys.stderr,
    )
    return status or 1


def commit_of_reference(repository: GitRepository, reference: str) -> str:
    """Return the commit of a reference; a branch of a remote wins over a tag of its name.

    Git itself prefers the tag, which whoever pushes the code may have set.
    """
    tag, branch, remote = (
        _commit_or_none(repository, f"refs/{kind}/{reference}")
        for kind in ("tags", "heads", "remotes")
    )
    if remote is not None:
        return remote
    if tag is not None and branch is not None and tag != branch:
        raise QgateError(
            f"--gate-from {reference!r} is both a tag and a branch: write refs/tags/{reference} or "
            f"refs/heads/{reference}."
        )
    commit = _commit_or_none(repository, reference)
    if commit is None:
        raise QgateError(
            f"--gate-from {reference!r} is no commit of this clone: fetch it (`git fetch origin "
            "main`; in GitHub Actions `fetch-depth: 0` of actions/checkout) and write origin/main."
        )
    return commit


def _commit_or_none(repository: GitRepository, revision: str) -> str | None:
    try:
        return repository.commit_of(revision)
    except QgateError:
        return None


def _unpack(repository: GitRepository, commit: str, target: Path) -> None:
    """Write all files of a commit to a new folder, by an index of its own.

    An archive of git would leave out what `export-ignore` says, and a work tree of git would stay
    in the clone after a kill.
    """
    target.mkdir()
    index = {"GIT_INDEX_FILE": str(target.with_suffix(".index")), "GIT_WORK_TREE": str(target)}
    for words in (
        ["read-tree", "--no-sparse-checkout", commit],
        ["checkout-index", "--all", "--force", "--quiet", "--ignore-skip-worktree-bits"],
    ):
        try:
            repository.run(*words, folder=repository.root, environment=index)
        except QgateError as error:
            raise QgateError(
                f"the files of commit {commit[:12]} cannot be written to {str(target)!r}: {error} "
                "Check that the disk has room, and with `git fsck` that the clone is whole."
            ) from None


def _link_ignored(repository: GitRepository, base: Path) -> None:
    """Link what git ignores, such as built extensions, where the commit has nothing."""
    ignored = "--others", "--ignored", "--exclude-standard", "--directory"
    for name in repository.names("ls-files", "-z", *ignored):
        target = base / name.rstrip("/")
        is_left = PurePosixPath(name).name.startswith((OUT, _COMPILED))
        is_inside = target.parent.is_dir() and target.parent.resolve().is_relative_to(base)
        if not is_left and is_inside and not os.path.lexists(target):
            target.symlink_to(repository.root / name.rstrip("/"))


def _settings_files(repository: GitRepository, commit: str) -> set[str]:
    """List the settings files of the commit and of this checkout."""
    listed_files = repository.names("ls-tree", "-r", "-z", "--name-only", commit)
    listed_files += repository.names("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return {name for name in listed_files if PurePosixPath(name).name in _SETTINGS}


def _overlay(root: Path, base: Path, target: Path, gates: AbstractSet[str]) -> None:
    """Link this checkout into a folder, but for the gates, which are those of the base.

    A file in place of a folder of gates is left out, and so are settings that git does not list,
    as those behind a link to a folder.
    """
    opened = {str(parent) for name in gates for parent in PurePosixPath(name).parents}
    left_out = {".git", _COMPILED, *_SETTINGS}

    def link(name: str) -> None:
        for entry in sorted(os.listdir(root / name)):  # noqa: PTH208
            path = (PurePosixPath(name) / entry).as_posix()
            if path in gates or entry in left_out or entry.startswith(OUT):
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


def _suites(folder: Path, words: Sequence[str]) -> list[str]:
    """Return the suites of the base if the words do not begin with others."""
    if words and not words[0].startswith("-"):
        return []
    project = settings_above(folder)
    if not project.suites and (folder / "suites").is_dir():
        return ["suites"]
    return [os.path.relpath(suite, folder) for suite in project.suite_folders]


def _planned(base: Path, inside: Path, tests: Sequence[str], reference: str) -> BaseCollection:
    """Return what the base commit collects with its own code and its own settings."""
    file = base.with_name("planned.json")
    more = ["-p", "qgate.plugin.gate_listing", "--qgate-list", str(file), "--collect-only", "-q"]
    # This environment may have the package of this checkout installed, which the base has in src.
    sources = [base / folder / "src" for folder in (inside, *inside.parents)]
    paths = [source for source in sources if source.is_dir()]
    status = _pytest(base / inside, [*tests, *more], quiet=True, paths=paths)
    listing = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"gates": []}
    if status or not listing["gates"]:
        raise QgateError(
            f"no gates of {reference} can be collected (pytest ended with {status}): check it out "
            f"and run `pytest {' '.join(tests)} --collect-only` to see why. If it has none yet, "
            "merge some first."
        )
    home = Path(listing["home"])
    home = home.relative_to(base) if home.is_relative_to(base) else inside
    # Options may be read from a file, as in `pytest @options.txt`.
    typed_files = [str(base / inside / word[1:]) for word in tests if word.startswith("@")]
    named = [Path(path) for path in [*listing["paths"], *typed_files] if "://" not in path]
    files = {path.relative_to(base).as_posix() for path in named if path.is_relative_to(base)}
    if whole := next((path for path in named if (base / inside).is_relative_to(path)), None):
        raise QgateError(
            f"{os.path.relpath(whole, base / inside)!r} has code as well as gates, so the code of "
            f"{reference} would be tested in place of yours: give only the files or folders of the "
            f"gates, as in `qgate run suites --gate-from {reference}`."
        )
    suites = [base / path if (base / path).is_dir() else (base / path).parent for path in files]
    folders = [path.relative_to(base).as_posix() for path in dict.fromkeys(suites) if path != base]
    files |= {(folder / "baselines").as_posix() for folder in (inside, home)}
    elsewhere = [path for path in named if not path.is_relative_to(base)]
    return BaseCollection(listing["gates"], files, elsewhere, home, sorted(folders))


def _refuse_paths_of(repository: GitRepository, plan: BaseCollection, reference: str) -> None:
    """Refuse gates and settings that are named as files of this checkout."""
    for path in plan.elsewhere:
        if path.resolve().is_relative_to(repository.root):
            near = os.path.relpath(path.resolve(), repository.folder)
            raise QgateError(
                f"{str(path)!r} is a path into this checkout, but suites and settings are taken "
                f"from {reference}: write {near!r}."
            )


def _pytest(
    folder: Path,
    words: Iterable[str],
    *,
    quiet: bool = False,
    first: Iterable[Path] = (),
    paths: Iterable[Path] = (),
) -> int:
    """Run pytest in a folder; modules are imported from `first`, the folder, and then `paths`.

    First come the suites, so that no file of the checkout hides a module that lies beside them.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _HIDING}
    folders = [*map(str, first), str(folder), *map(str, paths)]
    parts = [*folders, *filter(None, [environment.get("PYTHONPATH", "")])]
    environment["PYTHONPATH"] = os.pathsep.join(parts)
    keep_on = () if quiet else ("-p", "qgate.plugin.closed_pipes")
    # Safe path: else the folder would come before all of PYTHONPATH.
    command = [sys.executable, "-P", "-m", "pytest", *words, "-p", "no:cacheprovider", *keep_on]
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


@contextlib.contextmanager
def _out_folder(root: Path, home: Path) -> Iterator[Path]:
    """Hold the folder for results that a run of pytest would hold, to the end of this run."""
    refuse_links(root, str(home / OUT))
    check_out_folder(root / home / OUT)
    with contextlib.ExitStack() as holding:
        try:
            folder = holding.enter_context(held_out_folder(root / home))
        except OSError as error:
            raise QgateError(
                f"results cannot be written to {str(error.filename)!r}: {error.strerror}. Make the "
                "folder writable or wait for other runs to end, and run this again."
            ) from None
        for name in (REPRODUCTIONS, CANDIDATES):
            refuse_links(root, str(home / folder.name / name))
        yield folder


def _keep_results(made: Path, target: Path) -> None:
    """Replace the results in a folder by those of this run, if it has any."""
    if not made.is_dir():
        return
    clear(target.parent, target.name, WRITTEN)
    files = [path for path in made.rglob("*") if path.is_file() and path.name != RUNNING]
    remove_files(target.parent, *(f"{target.name}/{path.relative_to(made)}" for path in files))
    shutil.copytree(made, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(RUNNING))
