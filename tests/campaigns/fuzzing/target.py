"""What is fuzzed: files that the house itself wrote, and the function of the house that reads them."""

from __future__ import annotations

import fnmatch
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qgate.errors import QgateError
from tests.campaigns.fuzzing.guard import SECONDS, Outcome, guarded
from tests.campaigns.fuzzing.mutation import Choices, mutated

SECRET = "outside"


@dataclass(frozen=True)
class Target:
    """`make` fills a folder with good files, `read` is what a user's command does with them.

    readers  functions of the house that open or parse here, as `module:function`
    files    which of the files are made worse
    allowed  what may be raised beside errors of qgate and of the system
    share    how many cases of a short run are its own
    is_text  its seeds are expressions, of which some mean nothing here
    """

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    readers: tuple[str, ...]
    files: str = "*"
    allowed: tuple[type[BaseException], ...] = ()
    share: int = 12
    is_text: bool = False


def text_target(
    name: str, seeds: tuple[str, ...], parse: Callable[[str], object], readers: tuple[str, ...] = ()
) -> Target:
    """A parser of expressions: each seed is a file, and what is read is its text."""

    def make(folder: Path) -> None:
        for number, seed in enumerate(seeds):
            (folder / f"{number}.txt").write_bytes(seed.encode())

    def read(folder: Path) -> None:
        refused: list[Exception] = []
        for path in sorted(folder.glob("*.txt")):
            try:
                parse(path.read_bytes().decode("utf-8", "surrogateescape"))
            except (QgateError, OSError) as error:
                refused.append(error)
        if refused:
            raise refused[0]

    return Target(name, make, read, readers, is_text=True)


@functools.cache
def seeds_of(target: Target) -> Mapping[str, bytes]:
    """The files of a target, made once."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        target.make(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def worse(target: Target, data: bytes) -> dict[str, bytes]:
    """The files of a target with one of them made worse, as the choices say."""
    choices = Choices(data)
    files = dict(seeds_of(target))
    names = [name for name in files if fnmatch.fnmatch(name, target.files)]
    name = choices.of(names)
    files[name] = mutated(name, files[name], choices)
    return files


def run_files(
    target: Target, files: Mapping[str, bytes], folder: Path, seconds: float = SECONDS
) -> Outcome:
    """What reading these files comes to, in a folder beside one that is nobody's business."""
    case = _case(files, folder)
    return guarded(
        lambda: target.read(case),
        size=sum(map(len, files.values())),
        outside=folder / SECRET,
        canary=Path("canary"),
        allowed=target.allowed,
        seconds=seconds,
    )


def run_folder(target: Target, change: Callable[[Path], object], folder: Path) -> Outcome:
    """The same of the good files with something done to their folder."""
    case = _case(seeds_of(target), folder)
    change(case)
    size = sum(path.stat().st_size for path in case.rglob("*") if path.is_file())
    return guarded(
        lambda: target.read(case),
        size=size,
        outside=folder / SECRET,
        canary=Path("canary"),
        allowed=target.allowed,
    )


def _case(files: Mapping[str, bytes], folder: Path) -> Path:
    case, outside = folder / "case", folder / SECRET
    for directory in (case, outside):
        shutil.rmtree(directory, ignore_errors=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    for name, content in files.items():
        path = case / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return case


@functools.cache
def warmed(target: Target) -> Outcome:
    """What the good files come to; what the house imports for them is in memory afterwards."""
    with tempfile.TemporaryDirectory() as root:
        return run_files(target, seeds_of(target), Path(root), seconds=60.0)


def run_case(target: Target, data: bytes, folder: Path) -> Outcome:
    """One case by its choices."""
    return run_files(target, worse(target, data), folder)
