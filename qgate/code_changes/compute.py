"""Compare a project with a commit: changed functions and accepted files, or everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qgate.code_changes.reach import ProjectCode
from qgate.code_changes.sources import SourceFile
from qgate.errors import QgateError
from qgate.storage.git import GitRepository

# Files that no run reads, unless code has their name.
_DOCUMENTS = (".md", ".rst")
_UNREAD = ("LICENSE", ".gitignore", ".gitattributes", "CODEOWNERS")
_CI_FOLDERS = (".github", ".gitlab")


@dataclass
class TouchedCode:
    """The touched parts of a project: `everything` says why it is all of it, else it is empty.

    names     functions and classes whose bodies differ
    files     suites that differ themselves
    baselines folders of baselines, relative to their root, in which something differs
    paths     the files that differ and matter, for people
    """

    everything: str = ""
    names: set[str] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    baselines: set[str] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)
    code: ProjectCode | None = None


def touched_since(
    repository: GitRepository,
    commit: str,
    loaded: Sequence[Path],
    folders: Sequence[Path],
    suites: Sequence[Path],
    baselines: Path,
    output: Path,
) -> TouchedCode:
    """Compare the working tree with a commit; an error wherever something is unclear.

    loaded     files that Python has imported, also those of the environment
    folders    folders that it imports from
    """
    touched = TouchedCode()
    root = repository.root
    code_files: list[Path] = []
    for path, is_old in repository.changed_files(commit):
        relative_path = path.relative_to(root).as_posix()
        if path.is_relative_to(output):
            continue
        if path.is_relative_to(baselines):
            touched.baselines.add(path.relative_to(baselines).parts[0])
        elif path.suffix == ".py" and path.name != "conftest.py":
            if not (is_old and path.is_file()):
                raise QgateError(f"{relative_path} is {'new' if path.is_file() else 'gone'}")
            code_files.append(path)
        elif not _is_unread(path, root):
            raise QgateError(f"{relative_path} differs")
        touched.paths.append(relative_path)
    documents = [name for name in touched.paths if Path(name).suffix in _DOCUMENTS]
    if not (code_files or documents):
        return touched
    tracked = repository.files_at(commit)
    # Some modules have the name of a file that there is not.
    inside = [file for file in loaded if file.is_relative_to(root) and file.is_file()]
    if unknown := [file for file in inside if file not in tracked]:
        raise QgateError(f"{unknown[0].relative_to(root).as_posix()} is not in {commit[:12]}")
    own_folders = [folder for folder in folders if folder.is_relative_to(root)]
    touched.code = code = ProjectCode([*inside, *suites], own_folders)
    texts = {text for file in code.files.values() for text in file.texts()}
    read = {Path(text).name for text in texts if text.endswith(_DOCUMENTS)}
    for name in documents:
        if Path(name).name in read:
            raise QgateError(f"{name} differs, and code names it")
    for path in code_files:
        if path in code.files:
            relative_path = path.relative_to(root).as_posix()
            before = SourceFile.parse(repository.text_at(commit, path), relative_path)
            _compare_files(before, code.files[path], path, path in suites, relative_path, touched)
    return touched


def _compare_files(
    before: SourceFile, now: SourceFile, path: Path, is_suite: bool, shown: str,
    touched: TouchedCode,
) -> None:  # fmt: skip
    if is_suite:
        if before.import_code != now.import_code or before.units != now.units:
            touched.files.add(path)
        return
    if before.import_code != now.import_code:
        raise QgateError(f"{shown} differs in what runs when it is imported")
    touched.names |= {
        name for name, unit in now.units.items() if unit.code != before.units[name].code
    }


def _is_unread(path: Path, root: Path) -> bool:
    first = path.relative_to(root).parts[0]
    return path.suffix in _DOCUMENTS or path.name in _UNREAD or first in _CI_FOLDERS
