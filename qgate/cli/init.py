"""Write suites (test files), an example model and settings into your repository.

  qgate init                                   here: suites/, qgate.toml, a line in .gitignore
  qgate init ../product --into tests/accuracy  another repository, another folder for the suites
  qgate init --suites layer_outputs,task       only these suites
  qgate init --ci github                       also a workflow that runs them (or --ci gitlab)
  qgate init --agents                          only a page that tells coding agents how to use qgate
  qgate init --dry-run                         only list what it would write

The example is a model with a kernel of its own. Its gates run at once: they are red until you
record baselines, then green. Replace the example with your model.

Files that exist with other contents are kept. --force replaces suites, for example after an update
of qgate; the example and the settings are yours and are never replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files as packaged
from pathlib import Path

from qgate.cli._ci_files import SERVICES, ci_files, ci_note
from qgate.cli._console import add_json, print_json
from qgate.cli._repository import BASELINES, NewFile, RepositoryFolder, read_bytes, suites_folder
from qgate.errors import QgateError, unknown
from qgate.storage.files import neighbor, replacing
from qgate.storage.removing import remove_empty_folder, remove_files
from qgate.text.printing import print_text

SETTINGS = "qgate.toml"
AGENT_PAGE = ".agents/skills/qgate/SKILL.md"
EXAMPLE = "qgate_model.py"
OUT = "qgate-out"
"""Without a slash, so that git ignores a link of this name, too."""
_CHANGES, _OTHERS = ("written", "replaced", "extended"), ("unchanged", "left alone")
Step = tuple[str, NewFile]
"""An action, one of `_CHANGES`, "unchanged" or "left alone", and the file."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help="the root of the "
        "repository (default: where you are)")  # fmt: skip
    add("--into", default="suites", metavar="DIR", help="folder for the suites (default suites)")
    add("--suites", action="append", metavar="NAMES", help="only these, separated by commas: "
        f"{', '.join(suite_names())}")  # fmt: skip
    add("--ci", action="append", default=[], choices=SERVICES, help="also files that run the "
        "gates in this service, with a job that refreshes baselines; repeatable")  # fmt: skip
    add("--agents", action="store_true", help=f"only {AGENT_PAGE}, which tells coding agents what "
        "to run, how to read a verdict, and what never to change")  # fmt: skip
    add("--force", action="store_true", help="replace suites that differ")
    add("--dry-run", action="store_true", help="say what would be written")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    repository = RepositoryFolder(args.folder, suites_folder(args.into))
    if args.agents:
        return _write_agent_page(repository, args)
    services = list(dict.fromkeys(args.ci))
    folders = repository.missing_folders()
    asked = [list(ci_files(name, repository.root, repository.into)) for name in services]
    is_first = args.force or repository.suites in folders
    kept_away = [] if is_first else [file for files in asked for file in _missing_beside(files)]
    ci = [file for files in asked for file in files if file not in kept_away]
    starters = _files(repository, _suites_asked(args.suites))
    removed = _removed(starters) if services and args.suites is None else []
    files = [*(file for file in starters if file not in removed), *ci]
    for file in ci:
        folders += [folder for folder in _missing_parents(file) if folder not in folders]
    steps = [_step(file, args.force) for file in files]
    notes = [
        *_notes(repository, steps),
        *_removal_note(removed, repository),
        *(_kept_away_note(file) for file in kept_away),
        *filter(None, (ci_note(service, repository.root) for service in services)),
    ]
    return _carry_out(
        args, repository, steps, folders, notes, _next(repository, [file.path for file in ci])
    )


def _write_agent_page(repository: RepositoryFolder, args: argparse.Namespace) -> int:
    if args.ci or args.suites is not None:
        raise QgateError(
            "--agents writes one page and nothing else: leave out --ci and --suites, and run "
            "`qgate init` with them first."
        )
    page = NewFile(repository.root / AGENT_PAGE, starter("SKILL.md.txt"))
    if not repository.root.is_dir():
        raise QgateError(f"there is no folder {str(repository.root)!r}: make it first.")
    tell = f"next:\n  git add {AGENT_PAGE}\nName it in AGENTS.md, if your agent looks there."
    return _carry_out(args, repository, [_step(page, args.force)], _missing_parents(page), [], tell)


def _carry_out(
    args: argparse.Namespace,
    repository: RepositoryFolder,
    steps: Sequence[Step],
    folders: Sequence[Path],
    notes: Sequence[str],
    next_step: str,
) -> int:
    """Write the files, unless that is only rehearsed, and say what was done."""
    if not args.dry_run:
        changed = [file for verb, file in steps if verb in _CHANGES]
        _write(changed, folders, repository.suites)
    if args.json:
        by_verb = {verb: [str(file.path) for done, file in steps if done == verb]
                   for verb in (*_CHANGES, *_OTHERS)}  # fmt: skip
        print_json({"dry_run": args.dry_run, **by_verb, "notes": notes})
        return 0
    print_text(_report(steps, repository.root, args.dry_run))
    for note in [*notes, *([] if args.dry_run else [next_step])]:
        print_text(f"\n{note}")
    return 0


def _missing_parents(file: NewFile) -> list[Path]:
    return [parent for parent in reversed(file.path.parents) if not parent.exists()]


# Files -------------------------------------------------------------------------


def suite_names() -> list[str]:
    """List the suites that qgate brings, without `test_`."""
    names = [file.name for file in (packaged("qgate") / "starter" / "suites").iterdir()]
    return sorted(name.removeprefix("test_").removesuffix(".py.txt") for name in names)


def _suites_asked(options: Sequence[str] | None) -> list[str]:
    every = suite_names()
    if options is None:
        return every
    names = [part.strip() for part in ",".join(options).split(",")]
    names = [name.removeprefix("test_").removesuffix(".py") for name in names]
    for name in names:
        if name not in every:
            raise unknown("suite", name, every)
    return list(dict.fromkeys(names))


def _files(repository: RepositoryFolder, suites: Sequence[str]) -> list[NewFile]:
    sources = {f"test_{name}.py": f"suites/test_{name}.py.txt" for name in suites}
    sources |= {name: f"{name}.txt" for name in ("__init__.py", "conftest.py", EXAMPLE)}
    files = [
        NewFile(repository.suites / name, starter(source), ours=name != EXAMPLE)
        for name, source in sources.items()
    ]
    if not repository.has_settings:
        files.append(NewFile(repository.root / SETTINGS, _settings(repository), ours=False))
    return [*files, NewFile(repository.root / ".gitignore", f"{OUT}\n".encode())]


def _settings(repository: RepositoryFolder) -> bytes:
    """Return the settings, which name the suites where `qgate run` would not look for them."""
    text = starter(SETTINGS).decode()
    if str(repository.into) != "suites":
        line = f"suites = {json.dumps(str(repository.into))}\n"
        text = text.replace("\n[limits]", f"{line}\n[limits]", 1)
    return text.encode()


def _removed(files: Sequence[NewFile]) -> list[NewFile]:
    """List files that are missing beside suites written before: their owner has removed them."""
    if not any(file.path.name.startswith("test_") and file.path.exists() for file in files):
        return []
    return [file for file in files if not file.path.exists() or file.path.name == ".gitignore"]


def _missing_beside(files: Sequence[NewFile]) -> list[NewFile]:
    """List files of a CI service that are missing beside others: their owner has removed them."""
    missing = [file for file in files if not file.path.exists()]
    return missing if len(missing) < len(files) else []


def _kept_away_note(file: NewFile) -> str:
    return (
        f"left out, since {file.path.name} was removed beside files that `qgate init --ci` wrote; "
        "with --force it writes it again."
    )


def _removal_note(removed: Sequence[NewFile], repository: RepositoryFolder) -> Iterator[str]:
    names = [file.path.name for file in removed if not file.path.exists()]
    if names:
        yield (
            f"left out, since {repository.into} has suites already: {', '.join(names)}. `qgate "
            "init` without --ci writes them."
        )


def starter(name: str) -> bytes:
    """Read a file that comes with qgate, to be copied."""
    return (packaged("qgate") / "starter" / name).read_bytes()


def _step(file: NewFile, force: bool) -> Step:
    """Decide what happens to a file."""
    before = read_bytes(file.path)
    if before is None:
        return "written", file
    if file.path.name == ".gitignore":
        return _extended(file, before)
    if before == file.content or file.path.name == "__init__.py":
        return "unchanged", file
    return "replaced" if force and file.ours else "left alone", file


def _extended(file: NewFile, before: bytes) -> Step:
    """Add a line to a .gitignore unless it is there."""
    if any(line.strip().removeprefix(b"/") == OUT.encode() for line in before.splitlines()):
        return "unchanged", file
    end = b"\r\n" if b"\r\n" in before else b"\n"
    gap = b"" if not before or before.endswith(b"\n") else end
    path = file.path.resolve() if file.path.is_symlink() else file.path
    return "extended", NewFile(path, before + gap + OUT.encode() + end)


def _write(files: Sequence[NewFile], folders: Sequence[Path], suites: Path) -> None:
    """Write all files, or leave the repository as it was.

    A new folder of suites comes last and whole: what lacks beside one counts as removed by its
    owner, and after a kill there is none.
    """
    undo: list[Callable[[], object]] = []
    path = Path()
    try:
        with contextlib.ExitStack() as stack:
            for path in folders:
                if path == suites:
                    part = stack.enter_context(neighbor(suites, folder=True))
                    continue
                undo.append(partial(remove_empty_folder, path))
                path.mkdir()
            for file in files:
                path = file.path
                if suites in folders and path.parent == suites:
                    target = part / path.name
                else:
                    target, before = path, path.read_bytes() if path.exists() else None
                    undo.append(
                        partial(remove_files, path.parent, path.name)
                        if before is None
                        else partial(_restore, path, before)
                    )
                with replacing(target) as written:
                    written.write_bytes(file.content)
            if suites in folders:
                part.replace(path := suites)
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


def _restore(path: Path, before: bytes) -> None:
    with replacing(path) as written:
        written.write_bytes(before)


# Printed lines ----------------------------------------------------------------------------------


def _report(steps: Sequence[Step], root: Path, dry: bool) -> str:
    """List the files by what happened to them."""
    lines = []
    for verb in (*_CHANGES, *_OTHERS):
        files = [file for done, file in steps if done == verb]
        would = "would be " if dry and verb in _CHANGES else ""
        lines += [f"{would}{verb}:"] * bool(files)
        for file in files:
            is_inside = file.path.is_relative_to(root)
            name = file.path.relative_to(root).as_posix() if is_inside else str(file.path)
            hint = "differs; --force replaces it" if file.ours else "yours; remove it to renew it"
            lines.append(f"  {name}" + (f"  ({hint})" if verb == "left alone" else ""))
    return "\n".join(lines)


def _notes(repository: RepositoryFolder, steps: Sequence[Step]) -> Iterator[str]:
    """Name the settings of this repository that keep the suites from running."""
    missing = _missing_settings(repository)
    if missing:
        yield "\n".join(["pyproject.toml has [tool.qgate], so put there:", *missing])
    if any(file.path.name == "conftest.py" and verb == "left alone" for verb, file in steps):
        yield (
            f"{repository.into}/conftest.py is yours: let it put its folder on sys.path, so that "
            f"{EXAMPLE} is found there,\nor give the suites a folder of their own with --into."
        )
    if repository.conftest_options:
        theirs, ours = (
            ", ".join(f"--{start}{name}" for name in repository.conftest_options)
            for start in ("", "qgate-")
        )
        yield f"conftest.py has {theirs} of its own; qgate's: {ours}."
    for name, value, addition in repository.hiding_settings:
        yield (
            f"pytest is set up with {name} = {value}, which finds none of the suites: add "
            f"{addition} there,\nor run them as `pytest {shlex.quote(str(repository.into))} -o "
            f"{name}={addition}`."
        )
    if repository.finds_packages:
        yield (
            f"setuptools takes every folder here for a package unless pyproject.toml says which "
            "are:\n  [tool.setuptools]\n  packages = [...]  # without "
            f"{repository.into.parts[0]} and {BASELINES}"
        )
    if repository.ignored_baselines:
        names = ", ".join(repository.ignored_baselines)
        yield f"git ignores {names}:\nadd them with --force, as below, or CI has none."


def _missing_settings(repository: RepositoryFolder) -> list[str]:
    """Return settings that an existing [tool.qgate] lacks, without limits, which have defaults."""
    table = repository.table("tool", "qgate")
    lines = _settings(repository).decode().partition("[limits]")[0].splitlines()
    keys = {line.split(" =")[0]: line for line in lines if "=" in line}
    return [] if table is None else [f"  {keys[key]}" for key in keys if key not in table]


def _next(repository: RepositoryFolder, ci_paths: Sequence[Path]) -> str:
    """Write the three commands that lead to a green gate under version control."""
    into, root = shlex.quote(str(repository.into)), repository.root.resolve()
    start = "--qgate-" if "update-baselines" in repository.conftest_options else "--"
    gates, record = f"pytest {into}", f"pytest {into} {start}update-baselines"
    settings = "pyproject.toml" if repository.has_settings else SETTINGS
    force = " --force" if repository.ignored_baselines else ""
    more = [shlex.quote(os.path.relpath(path.resolve(), root)) for path in ci_paths]
    if repository.has_baselines:
        judged, recorded = f"compares with {BASELINES}", "accepts what is new or out of tolerance"
    else:
        judged = "red: nothing is recorded yet"
        recorded = "records what is measured now, and it is green"
    enter = "" if root == Path.cwd() else f"  cd {shlex.quote(str(repository.root))}\n"
    return (
        f"next:\n{enter}"
        f"  {gates:{len(record)}}  # {judged}\n"
        f"  {record}  # {recorded}\n"
        f"  git add {' '.join([into, settings, '.gitignore', *more])} && git add{force} {BASELINES}"
    )
