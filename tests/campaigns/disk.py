"""A disk that is full or a quota that is used up: at every step, at any byte, and for real.

For real is a file system in memory with a ballast that leaves so many blocks free; only root can
mount one. The other two need no rights: an error of the system at a step, and a limit of the system
on the size of files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares, spread
from tests.campaigns.forked import ran
from tests.campaigns.moments import failing_from, limited
from tests.campaigns.scenarios import SCENARIOS

_CODES = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 4096


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    say("a real full disk is among them" if benches.disk else "no file system can be mounted here")
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        _errors(bench, share // 2)
        _limits(bench, share // 4)
        if benches.disk is not None:
            _full(bench, benches.disk, share - share // 2 - share // 4)
        tallies.append(bench.tally)
        say(f"{name}: done")
    return tallies


def _errors(bench: Bench, count: int) -> None:
    """From a step on nothing has room, or this once."""
    new, scenario = bench.new, bench.scenario
    assert new
    for number, step in enumerate(spread(bench.random, len(bench.steps), max(1, count))):
        code, single = _CODES[number % 2], number % 4 < 2
        fault = failing_from(bench.case, step, code, once=single)
        ended = ran(scenario.verb, bench.fresh(), fault)
        when = "at" if single else "from"
        about = f"{errno.errorcode[code]} {when} step {step}, {bench.steps[step - 1]}"
        bench.judge_told(about, ended, os.strerror(code))


def _limits(bench: Bench, count: int) -> None:
    """No file may grow beyond a size."""
    for _ in range(count):
        size = bench.drawn_size()
        ended = ran(bench.scenario.verb, bench.fresh(), limited(size))
        bench.judge_told(f"EFBIG at byte {size}", ended, os.strerror(errno.EFBIG))


def _full(bench: Bench, disk: Path, count: int) -> None:
    """So many blocks are free, from none to what an undisturbed run takes."""
    ballast = disk / "ballast"
    files = len(bench.new) + sum(len(data) // _BLOCK for data in bench.new.values())
    for _ in range(count):
        free = bench.random.randrange(files + 4)
        bench.fresh()
        _fill(ballast, disk, free)
        try:
            ended = ran(bench.scenario.verb, bench.case)
        finally:
            ballast.unlink()
        about = f"a disk with {free} free blocks"
        bench.judge_told(about, ended, os.strerror(errno.ENOSPC))


def _fill(ballast: Path, disk: Path, free: int) -> None:
    excess_blocks = os.statvfs(disk).f_bfree - free
    with ballast.open("wb") as file:
        if excess_blocks > 0:
            os.posix_fallocate(file.fileno(), 0, excess_blocks * _BLOCK)


@contextlib.contextmanager
def small_disk(folder: Path, wanted: bool = True, megabytes: int = 64) -> Iterator[Path | None]:
    """A file system of its own size; None where none is wanted, or can be mounted."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    size = ("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    if wanted:
        folder.mkdir()
    if not (wanted and mount and umount) or _failed(mount, *size):
        yield None
        return
    try:
        yield folder
    finally:
        _failed(umount, str(folder))


@contextlib.contextmanager
def remounted(folder: Path) -> Iterator[None]:
    """Read-only for a while."""
    mount = shutil.which("mount") or ""
    if _failed(mount, "-o", "remount,ro", str(folder)):
        raise AssertionError(f"{folder} cannot be made read-only")
    try:
        yield
    finally:
        _failed(mount, "-o", "remount,rw", str(folder))


def _failed(*command: str) -> bool:
    return bool(subprocess.run(command, capture_output=True, check=False).returncode)
