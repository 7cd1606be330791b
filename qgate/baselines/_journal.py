"""Several files changed as one, whatever happens in between.

New files are written beside the old ones, as `.NAME.new`. Then the journal, which lists them with
their hashes, appears by one rename: from there on the update has happened. Files are moved into
place, and the journal goes. Whoever reads while a journal is there reads the new files wherever
they lie; the next writer moves what is left. Without a journal, leftovers mean nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qgate.baselines._reading import check_version
from qgate.errors import QgateError

NAME = ".journal.json"
VERSION = 1
_FILES = re.compile(r"manifest\.json|reference-[a-z0-9_]+\.safetensors|accepted/[a-z0-9._~-]+\.txt")
LEFTOVER = re.compile(r"\..*\.new")
_TRIES, _PAUSE = 200, 0.01

Contents = Mapping[str, bytes | None]


def staged(folder: Path, name: str) -> Path:
    """Where a file is written before it takes its place."""
    path = folder / name
    return path.with_name(f".{path.name}.new")


# Reading ---------------------------------------------------------------------------------------


def read_files(folder: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, bytes], list[str]]:
    """The contents of the wanted files and the names of all, from one moment between two updates.

    A reader takes no lock, since a folder may be read-only: it looks again when something moved.
    """
    for _ in range(_TRIES):
        problem: Exception | None = None
        try:
            before = _traces(folder)
            try:
                found = _read_once(folder, wanted)
            except (QgateError, OSError) as error:
                problem = error
            if _traces(folder) == before:
                break
        except OSError as error:
            problem = error
            break
        time.sleep(_PAUSE)
    else:
        raise QgateError(f"the baselines in {str(folder)!r} change all the time: run this again.")
    if isinstance(problem, OSError):
        where = problem.filename or folder
        raise QgateError(f"{str(where)!r} cannot be read: {problem.strerror}.") from None
    if problem is not None:
        raise problem
    return found


def _read_once(folder: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, bytes], list[str]]:
    journal = read_journal(folder) or {}
    names = [name for name in _visible(folder) if name not in journal]
    names += [name for name, sha256 in journal.items() if sha256 is not None]
    found = {}
    for name in sorted(names):
        if wanted(name):
            sha256 = journal.get(name)
            held = _held(folder, name, sha256) if sha256 else folder / name
            found[name] = held.read_bytes()
    return found, sorted(names)


def _held(folder: Path, name: str, sha256: str) -> Path:
    """Where the content is that a journal promises."""
    for path in (staged(folder, name), folder / name):
        with contextlib.suppress(FileNotFoundError):
            if sha256_of(path.read_bytes()) == sha256:
                return path
    raise broken(str(folder / NAME), name)


def broken(journal: str, name: str) -> QgateError:
    """A journal promises what is nowhere."""
    return QgateError(
        f"{journal!r} is the rest of an update that was cut off, and {name!r} has been "
        "changed since. Delete that file to keep the baseline that is there, and check it with "
        "`qgate baselines verify`."
    )


def _visible(folder: Path) -> Iterator[str]:
    """Files that are no machinery, folders inside included."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.name.startswith(".") and not path.is_dir():
            yield name


def _traces(folder: Path) -> list[tuple[str, int, int, int]]:
    """What moves when an update happens."""
    traces = []
    for name in (NAME, *_visible(folder)):
        with contextlib.suppress(FileNotFoundError):
            stat = (folder / name).stat()
            traces.append((name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return traces


def read_journal(folder: Path) -> dict[str, str | None] | None:
    """File names and the hashes of their new contents, None for files that go; None without one."""
    path = folder / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return parsed(data, str(path))


def parsed(data: bytes, shown: str) -> dict[str, str | None] | None:
    """A journal out of its file; None for one that was not written to its end."""
    try:
        record = json.loads(data)
        version, files = record["version"], dict(record["files"])
        if record["sha256"] != _seal(version, files):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    check_version(shown, version, VERSION)
    if all(_FILES.fullmatch(name) for name in files):
        return files
    raise QgateError(f"{shown!r} names files that are none of a baseline: delete it.")


def written(hashes: Mapping[str, str | None]) -> bytes:
    """The file of a journal."""
    record = {"version": VERSION, "files": dict(hashes), "sha256": _seal(VERSION, dict(hashes))}
    return json.dumps(record, indent=1).encode("utf-8")


def hashes_of(contents: Contents) -> dict[str, str | None]:
    """What a journal says of the contents to come."""
    return {name: None if data is None else sha256_of(data) for name, data in contents.items()}


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(version: object, files: object) -> str:
    text = json.dumps([version, files], sort_keys=True)
    return sha256_of(text.encode("utf-8"))


# Writing, under the lock -----------------------------------------------------------------------


def replace_files(folder: Path, contents: Contents) -> None:
    """Write and remove files: all of them, or none where an error comes out before the journal."""
    try:
        for name, content in contents.items():
            if (folder / name).parent.is_symlink():
                raise QgateError(
                    f"{str((folder / name).parent)!r} is a link, and nothing is written through "
                    "it: put a folder in its place."
                )
            if content is not None:
                make_folder((folder / name).parent)
                _write(staged(folder, name), content)
        for parent in {(folder / name).parent for name in contents}:
            _sync(parent)
        hashes = hashes_of(contents)
        _write(staged(folder, NAME), written(hashes))
        os.replace(staged(folder, NAME), folder / NAME)  # noqa: PTH105
    except BaseException:
        if not (folder / NAME).exists():
            with contextlib.suppress(OSError):
                clean(folder)
        raise
    _finish(folder, hashes)


def recover(folder: Path) -> None:
    """Finish what an interrupted update has promised, and remove what it left."""
    journal = read_journal(folder)
    if journal is not None:
        for name, sha256 in journal.items():
            if sha256 is not None:
                _held(folder, name, sha256)
        _finish(folder, journal)
    clean(folder)


def _finish(folder: Path, hashes: Mapping[str, str | None]) -> None:
    _sync(folder)
    for name, sha256 in hashes.items():
        with contextlib.suppress(FileNotFoundError):
            if sha256 is None:
                os.unlink(folder / name)  # noqa: PTH108
            elif _held(folder, name, sha256) != folder / name:
                os.replace(staged(folder, name), folder / name)  # noqa: PTH105
    for parent in {(folder / name).parent for name in hashes}:
        if parent.is_dir():
            _sync(parent)
    os.unlink(folder / NAME)  # noqa: PTH108
    with contextlib.suppress(OSError):  # should the journal come back, it asks for what is there
        _sync(folder)


def leftovers(folder: Path) -> list[str]:
    """Files of updates that were cut off, but for the journal of one that counts."""
    found = [path for path in folder.rglob(".*.new") if LEFTOVER.fullmatch(path.name)]
    if (folder / NAME).exists() and read_journal(folder) is None:
        found.append(folder / NAME)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def clean(folder: Path) -> None:
    """Remove leftovers; not for readers, as a writer may be at work on them."""
    for name in leftovers(folder):
        os.unlink(folder / name)  # noqa: PTH108


def make_folder(folder: Path) -> None:
    """A folder with those above it, all of them on the disk and not only in memory."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102
        _sync(folder.parent)


def _write(path: Path, content: bytes) -> None:
    """What lies there, also a link to somewhere else, is no place to write to."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
