"""Folders and files that may not be written: as an unprivileged user, since root writes anywhere.

Every folder that a verb writes to is closed on its own, then all of them at once, and once more as
a file system that is mounted read-only, where one can be mounted.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares
from tests.campaigns.disk import remounted
from tests.campaigns.forked import ran
from tests.campaigns.scenarios import SCENARIOS

_NOBODY = 65534


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for folder in (benches.home, *benches.home.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    (benches.home / "tmp").chmod(0o777)
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        _closed(bench, share)
        if benches.disk is not None:
            _read_only(bench, benches.disk)
        tallies.append(bench.tally)
        say(f"{name}: done")
    return tallies


def _folders(bench: Bench) -> list[Path]:
    """Those that exist before, and in which a run changes something."""
    assert bench.new
    changed = {name for name in bench.old.keys() | bench.new.keys()
               if bench.old.get(name) != bench.new.get(name)}  # fmt: skip
    parents = {Path(name).parent for name in changed}
    parents |= {parent for folder in parents for parent in folder.parents}
    bench.fresh()
    return sorted(folder for folder in parents if (bench.case / folder).is_dir())


def _closed(bench: Bench, count: int) -> None:
    folders = _folders(bench)
    chosen = folders if len(folders) < count else sorted(bench.random.sample(folders, count - 1))
    for closed in [*([folder] for folder in chosen), folders]:
        bench.fresh()
        _give(bench.case, closed)
        ended = ran(bench.scenario.verb, bench.case, _as_nobody)
        _take_back(bench.case)
        about = f"closed: {', '.join(map(str, closed))}"
        bench.judge_told(about, ended, os.strerror(errno.EACCES))


def _read_only(bench: Bench, disk: Path) -> None:
    bench.fresh()
    with remounted(disk):
        ended = ran(bench.scenario.verb, bench.case)
    bench.judge_told("a read-only file system", ended, os.strerror(errno.EROFS))


def _as_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def _give(case: Path, closed: list[Path]) -> None:
    """All is nobody's, but for the folders that are closed and what lies in them."""
    for path in (case, *case.rglob("*")):
        inside = path.relative_to(case)
        shut = inside in closed or (path.is_file() and inside.parent in closed)
        if os.geteuid() == 0:
            shutil.chown(path, 0 if shut else _NOBODY, 0 if shut else _NOBODY)
        path.chmod((0o555 if shut else 0o755) if path.is_dir() else (0o444 if shut else 0o644))


def _take_back(case: Path) -> None:
    for path in (case, *case.rglob("*")):
        if os.geteuid() == 0:
            shutil.chown(path, 0, 0)
        path.chmod(0o755 if path.is_dir() else 0o644)
