"""Locks and files of systems without fcntl: with msvcrt, as Windows has it, or with neither.

Each case is a fork that imports qgate anew without the modules of POSIX. There msvcrt is a
stand-in: it locks bytes as the real one does, and like that one it refuses to move open files.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import house
from tests.campaigns.forked import ran
from tests.shares import share

LIGHT = ("qgate", "qgate.plugin", "qgate.cli", "qgate.testing", "qgate.dumps", "qgate.baselines")


def stand_in() -> types.ModuleType:
    """Lock one byte with the locks of Linux that belong to an open file."""
    module = types.ModuleType("msvcrt")
    module.LK_NBLCK = 2  # type: ignore[attr-defined]

    def locking(handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        assert os.lseek(handle, 0, os.SEEK_CUR) > 1 << 20, "a byte that others may want to read"
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EACCES, "Permission denied") from None

    module.locking = locking  # type: ignore[attr-defined]
    return module


def elsewhere(case: Callable[[Path], None], folder: Path, msvcrt: bool) -> None:
    """Run a case in a fork whose qgate was imported on a system without fcntl."""

    def verb() -> int:
        for name in [name for name in sys.modules if name.split(".")[0] == "qgate"]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(house.POSIX_ONLY))  # type: ignore[arg-type]
        if msvcrt:
            sys.modules["msvcrt"] = stand_in()
        case(folder)
        return 0

    ended = ran(verb, folder)
    assert ended.status == 0, ended.said


def imports(_folder: Path) -> None:
    for name in LIGHT:
        importlib.import_module(name)
    assert sys.modules["fcntl"] is None


def replaces(folder: Path) -> None:
    from qgate.storage.files import neighbor, replacing

    refuse_open_files()
    with replacing(folder / "page.html") as written:
        written.write_text("new")
    with neighbor(folder / "dump", folder=True) as part:
        (part / "whole").touch()
        part.replace(folder / "dump")
    assert (folder / "page.html").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["dump", "page.html"]
    with neighbor(folder / "page.html") as first, neighbor(folder / "page.html") as second:
        assert first != second, "a file in use is never taken for one that was left"


def refuse_open_files() -> None:
    """Refuse to move or remove what is open, as Windows does."""
    real = os.replace

    def replace(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert Path(source) not in [link.readlink() for link in links], f"{source} is open"
        real(source, target)

    os.replace = replace  # type: ignore[assignment]


def locks(folder: Path) -> None:
    from qgate.errors import QgateError
    from qgate.storage.files import lock

    path = folder / "lock"
    with lock(path, 0, "the baselines are"):
        assert str(os.getpid()) in path.read_text()
        try:
            with lock(path, 0, "the baselines are"):
                raise AssertionError("two hold the lock")
        except QgateError as error:
            message = str(error)
    assert f"the baselines are being updated by process {os.getpid()}" in message
    assert ("remove" in message) == (sys.modules.get("msvcrt") is None)
    assert not path.exists()
    with lock(path, 0, "the baselines are"):
        assert path.exists()


def writes_dumps(folder: Path) -> None:
    from qgate.dumps import Dump, DumpWriter, Record

    about = {"layer_type": "linear", "operation": "forward", "phase": "pre", "component": "linear"}
    with DumpWriter(folder / "run", header={"model": "tiny"}) as writer:
        writer.add(Record(order=0, name="input", **about), torch.ones(4, 4))
    dump = Dump.open(folder / "run")
    (record,) = dump.records()
    assert torch.equal(dump.tensor(record), torch.ones(4, 4))


@share(8)
@pytest.mark.parametrize("msvcrt", [True, False], ids=["msvcrt", "no locks"])
@pytest.mark.parametrize("case", [imports, replaces, locks, writes_dumps])
def test_a_system_without_fcntl(case: Callable[[Path], None], tmp_path: Path, msvcrt: bool) -> None:
    elsewhere(case, tmp_path, msvcrt)
