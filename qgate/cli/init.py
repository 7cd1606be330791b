"""Write suites, an example model and settings into a repository of yours.

  qgate init                                   here: suites/, qgate.toml, a line in .gitignore
  qgate init ../product --into tests/accuracy  elsewhere, the suites in a folder you name
  qgate init --suites layer_outputs,task       fewer suites
  qgate init --ci github                       and a workflow that runs them; gitlab likewise
  qgate init --dry-run

The example is a model with a kernel of its own, and the gates run on it at once: red while nothing
is recorded, then green. Put your model in its place.

What differs from what would be written stays as it is. --force replaces suites, as after an update
of qgate; the example and the settings are yours and are never replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files as packaged
from pathlib import Path

from qgate.cli._ci_files import SERVICES, ci_files, ci_note
from qgate.cli._repository import BASELINES, RepositoryFolder, inside, read_bytes
from qgate.errors import QgateError, unknown
from qgate.storage.files import replacing

SETTINGS = "qgate.toml"
EXAMPLE = "qgate_model.py"
OUT = "qgate-out/"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="the root of the repository (default: where you are)",
    )
    parser.add_argument(
        "--into", default="suites", metavar="DIR", help="folder in it for the suites (suites)"
    )
    parser.add_argument(
        "--suites",
        action="append",
        metavar="NAMES",
        help=f"only these, separated by commas: {', '.join(suite_names())}",
    )
    parser.add_argument(
        "--ci",
        action="append",
        default=[],
        choices=SERVICES,
        help="also what runs the gates there, with a job that refreshes baselines; repeatable",
    )
    parser.add_argument("--force", action="store_true", help="replace suites that differ")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")


def run(args: argparse.Namespace) -> int:
    place = RepositoryFolder(args.folder, inside(args.into))
    services = list(dict.fromkeys(args.ci))
    folders = place.missing_folders()
    of_ci = [file for each in services for file in ci_files(each, place.root, place.into)]
    files = _files(place, _chosen(args.suites))
    files += [File(each.path, each.content, each.ours) for each in of_ci]
    for each in of_ci:
        missing = [above for above in each.path.parents if not above.exists()]
        folders += [folder for folder in reversed(missing) if folder not in folders]
    steps = [Step.of(file, args.force) for file in files]
    notes = [*_notes(place, steps), *filter(None, (ci_note(each, place.root) for each in services))]
    if not args.dry_run:
        _write(steps, folders)
    print(_report(steps, place.root, args.dry_run))
    for note in notes:
        print(f"\n{note}")
    if not args.dry_run:
        print(f"\n{_next(place, [each.path for each in of_ci])}")
    return 0


# What is to be written -------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file and what is to be in it; `ours` if it stays as qgate brings it."""

    path: Path
    content: bytes
    ours: bool = True


@dataclass(frozen=True)
class Step:
    """What is done about a file: written, replaced, extended, unchanged or left alone."""

    file: File
    verb: str

    @classmethod
    def of(cls, file: File, force: bool) -> Step:
        there = read_bytes(file.path)
        if there is None:
            return cls(file, "written")
        if file.path.name == ".gitignore":
            return _extended(file, there)
        if there == file.content or file.path.name == "__init__.py":
            return cls(file, "unchanged")
        return cls(file, "replaced" if force and file.ours else "left alone")

    @property
    def changes(self) -> bool:
        return self.verb not in ("unchanged", "left alone")


def suite_names() -> list[str]:
    """The suites that qgate brings, without `test_`."""
    names = [each.name for each in (packaged("qgate") / "starter" / "suites").iterdir()]
    return sorted(name.removeprefix("test_").removesuffix(".py.txt") for name in names)


def _chosen(given: Sequence[str] | None) -> list[str]:
    every = suite_names()
    if given is None:
        return every
    names = [part.strip() for part in ",".join(given).split(",")]
    names = [name.removeprefix("test_").removesuffix(".py") for name in names]
    for name in names:
        if name not in every:
            raise unknown("suite", name, every)
    return list(dict.fromkeys(names))


def _files(place: RepositoryFolder, suites: Sequence[str]) -> list[File]:
    folder = place.suites
    found = [
        File(folder / f"test_{name}.py", starter(f"suites/test_{name}.py.txt")) for name in suites
    ]
    for name in ("__init__.py", "conftest.py"):
        found.append(File(folder / name, starter(f"{name}.txt")))
    found.append(File(folder / EXAMPLE, starter(f"{EXAMPLE}.txt"), ours=False))
    if not place.shares:
        found.append(File(place.root / SETTINGS, starter(SETTINGS), ours=False))
    return [*found, File(place.root / ".gitignore", f"{OUT}\n".encode())]


def starter(name: str) -> bytes:
    """A file that comes with qgate, to be copied."""
    return (packaged("qgate") / "starter" / name).read_bytes()


def _extended(file: File, there: bytes) -> Step:
    """A .gitignore with one more line, unless one says it already."""
    if any(line.strip().strip(b"/") == OUT.strip("/").encode() for line in there.splitlines()):
        return Step(file, "unchanged")
    end = b"\r\n" if b"\r\n" in there else b"\n"
    gap = b"" if not there or there.endswith(b"\n") else end
    path = file.path.resolve() if file.path.is_symlink() else file.path
    return Step(File(path, there + gap + OUT.encode() + end), "extended")


# Writing ---------------------------------------------------------------------------------------


def _write(steps: Sequence[Step], folders: Sequence[Path]) -> None:
    """All of it, or the repository is left as it was."""
    undo: list[Callable[[], object]] = []
    path = Path()
    try:
        for path in folders:
            path.mkdir()
            undo.append(path.rmdir)
        for file in (step.file for step in steps if step.changes):
            path = file.path
            before = path.read_bytes() if path.exists() else None
            with replacing(path) as neighbor:
                neighbor.write_bytes(file.content)
            undo.append(path.unlink if before is None else partial(path.write_bytes, before))
    except BaseException as error:
        for back in reversed(undo):
            with contextlib.suppress(OSError):
                back()
        if not isinstance(error, OSError):
            raise
        raise QgateError(
            f"{str(path)!r} cannot be written: {error.strerror}. What was written before it is "
            "undone; run `qgate init` again when it can be, or give another folder."
        ) from None


# What is said ----------------------------------------------------------------------------------


def _report(steps: Sequence[Step], root: Path, dry: bool) -> str:
    """The files, by what was done about them."""
    lines = []
    for verb in ("written", "replaced", "extended", "unchanged", "left alone"):
        files = [step.file for step in steps if step.verb == verb]
        would = "would be " if dry and files and verb in ("written", "replaced", "extended") else ""
        lines += [f"{would}{verb}:"] * bool(files)
        for file in files:
            inside = file.path.is_relative_to(root)
            shown = file.path.relative_to(root).as_posix() if inside else str(file.path)
            hint = "differs; --force replaces it" if file.ours else "yours; remove it to renew it"
            lines.append(f"  {shown}" + (f"  ({hint})" if verb == "left alone" else ""))
    return "\n".join(lines)


def _notes(place: RepositoryFolder, steps: Sequence[Step]) -> Iterator[str]:
    """What in this repository gets in the way of what was written."""
    missing = _missing_settings(place)
    if missing:
        yield "\n".join(["pyproject.toml has [tool.qgate], so put there:", *missing])
    if any(step.file.path.name == "conftest.py" and step.verb == "left alone" for step in steps):
        yield (
            f"{place.into}/conftest.py is yours: let it put its folder on sys.path, so that "
            f"{EXAMPLE} is found there,\nor give the suites a folder of their own with --into."
        )
    if place.taken:
        theirs, ours = (
            ", ".join(f"--{start}{name}" for name in place.taken) for start in ("", "qgate-")
        )
        yield f"conftest.py has {theirs} of its own; qgate's: {ours}."
    for name, given, wanted in place.overlooked:
        yield (
            f"pytest is set up with {name} = {given}, which finds none of the suites: add {wanted} "
            f"there,\nor run them as `pytest {shlex.quote(str(place.into))} -o {name}={wanted}`."
        )
    if place.finds_packages:
        yield (
            f"setuptools takes every folder here for a package unless pyproject.toml says which "
            f"are:\n  [tool.setuptools]\n  packages = [...]  # without {place.into.parts[0]} and "
            f"{BASELINES}"
        )
    if place.ignored:
        names = ", ".join(place.ignored)
        yield f"git ignores {names}:\nadd them with --force, as below, or CI has none."


def _missing_settings(place: RepositoryFolder) -> list[str]:
    """The lines of the settings that a [tool.qgate] lacks; limits are the defaults."""
    table = place.table("tool", "qgate")
    lines = starter(SETTINGS).decode().partition("[limits]")[0].splitlines()
    keys = {line.split(" =")[0]: line for line in lines if "=" in line}
    return [] if table is None else [f"  {keys[key]}" for key in keys if key not in table]


def _next(place: RepositoryFolder, of_ci: Sequence[Path]) -> str:
    """The three commands that lead to a green gate under version control."""
    into = shlex.quote(str(place.into))
    start = "--qgate-" if "update-baselines" in place.taken else "--"
    gates, record = f"pytest {into}", f"pytest {into} {start}update-baselines"
    settings = "pyproject.toml" if place.shares else SETTINGS
    force = " --force" if place.ignored else ""
    inside = place.root.resolve()
    more = [shlex.quote(os.path.relpath(path.resolve(), inside)) for path in of_ci]
    there = "" if place.root.resolve() == Path.cwd() else f"  cd {shlex.quote(str(place.root))}\n"
    return (
        f"next:\n{there}"
        f"  {gates:{len(record)}}  # red: nothing is recorded yet\n"
        f"  {record}  # records what is measured now, and it is green\n"
        f"  git add {' '.join([into, settings, '.gitignore', *more])} && git add{force} {BASELINES}"
    )
