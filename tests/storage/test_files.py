"""Files that are written whole: what a killed writer leaves goes with the next, and only that."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.storage import files
from qgate.storage.files import (
    neighbor,
    open_handle,
    remove_with_leftovers,
    replacing,
    scratch_folder,
    temporary_file,
)
from qgate.storage.folders import FileRanges, LocalFolder
from tests.baselines.faults import ended, in_child, started
from tests.shares import share


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_writing(path: Path, *, folder: bool = False) -> None:
    def work() -> None:
        with neighbor(path, folder=folder) as written:
            (written / "half" if folder else written).write_text("half")
            die()

    assert in_child(work) == -signal.SIGKILL


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    killed_while_writing(path)
    assert names(tmp_path) == [".page.html.part", "page.html"]
    assert path.read_text() == "old"
    with replacing(path) as written:
        assert written.read_bytes() == b"", "nothing of the killed writer's is taken over"
        written.write_text("new")
    assert (names(tmp_path), path.read_text()) == (["page.html"], "new")


def test_a_writer_at_work_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with replacing(path) as mine:
        mine.write_text("mine")
        assert in_child(lambda: write(path, "theirs")) == 0
        assert path.read_text() == "theirs"
        assert mine.read_text() == "mine"
        killed_while_writing(path)
        assert names(tmp_path) == [".page.html.1.part", ".page.html.part", "page.html"]
    assert path.read_text() == "mine"
    write(path, "last")
    assert (names(tmp_path), path.read_text()) == (["page.html"], "last")


def write(path: Path, text: str) -> None:
    with replacing(path) as written:
        written.write_text(text)


def test_many_writers_of_one_file_lose_none_of_their_neighbors(tmp_path: Path) -> None:
    path = tmp_path / "page.html"

    def writer(letter: str) -> Callable[[], None]:
        def work() -> None:
            for _ in range(150):
                write(path, 1000 * letter)

        return work

    children = [started(writer(letter)) for letter in "abcd"]
    assert [ended(child) for child in children] == [0, 0, 0, 0]
    assert len(set(path.read_text())) == 1
    assert len(path.read_text()) == 1000
    assert names(tmp_path) == ["page.html"]


def test_a_folder_of_a_killed_writer_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    killed_while_writing(path, folder=True)
    assert names(tmp_path) == [".dump.part"]
    with neighbor(path, folder=True) as written:
        assert names(written) == []
        (written / "whole").touch()
        written.replace(path)
    assert (names(tmp_path), names(path)) == (["dump"], ["whole"])

    def broken() -> None:
        with neighbor(tmp_path / "other", folder=True) as written:
            (written / "half").touch()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert names(tmp_path) == ["dump"]


def test_forgetting_takes_what_was_left_along(tmp_path: Path) -> None:
    path = tmp_path / "candidate.json"
    path.touch()
    killed_while_writing(path)
    remove_with_leftovers(path)
    assert names(tmp_path) == []
    remove_with_leftovers(path)


def test_what_is_not_a_neighbor_is_left_alone(tmp_path: Path) -> None:
    """A link to a file of somebody, and a folder: neither is written to, nor removed."""
    path, mine = tmp_path / "page.html", tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".page.html.part").symlink_to(mine)
    (tmp_path / ".page.html.1.part").mkdir()
    (tmp_path / ".page.html.1.part" / "more").touch()
    write(path, "new")
    assert (path.read_text(), mine.read_text()) == ("new", "mine")
    assert (tmp_path / ".page.html.part").is_symlink()
    assert (tmp_path / ".page.html.1.part" / "more").exists()
    assert not path.is_symlink()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_new_files(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    before = os.umask(mask)
    try:
        write(path, "new")
        with neighbor(tmp_path / "d", folder=True) as written:
            assert written.stat().st_mode & 0o777 == 0o777 & ~mask
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_next_run_removes_the_scratch_folder_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def killed() -> None:
        with scratch_folder() as folder:
            (folder / "inside").mkdir()
            die()

    assert in_child(killed) == -signal.SIGKILL
    (scratch,) = tmp_path.iterdir()
    assert (scratch / "inside").is_dir()
    with scratch_folder() as first, scratch_folder() as second:
        assert set(tmp_path.iterdir()) == {first, second}, "those of living processes stay"
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_folder_of_another_host_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for host in ("one", "one-more", "one.domain"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        with scratch_folder() as folder:
            folder.with_name(f"{folder.name}-left").mkdir()
        _, handle = temporary_file("qgate-rows-")
        os.close(handle)  # as a kill does
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 6
    monkeypatch.setattr(socket, "gethostname", lambda: "one")
    with scratch_folder():
        pass
    _, handle = temporary_file("qgate-rows-")
    os.close(handle)
    assert len({*folders} & {*tmp_path.iterdir()}) == 4


@pytest.mark.parametrize("kind", ["scratch folder", "neighbor"])
def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its lock is held it looks like one that a killed process has left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    removed: list[Path] = []

    def opened(path: Path, flags: int) -> int:
        if not removed and path.is_dir():
            removed.append(path)
            path.rmdir()
        return open_handle(path, flags)

    monkeypatch.setattr(files, "open_handle", opened)
    making = scratch_folder() if kind == "scratch folder" else neighbor(tmp_path / "d", folder=True)
    with making as folder:
        assert folder.is_dir()
    assert len(removed) == 1
    assert names(tmp_path) == []


def test_a_neighbor_folder_where_there_is_no_parent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), neighbor(tmp_path / "none" / "d", folder=True):
        pass


@share(2)
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_file_that_is_read_in_ranges_is_closed_with_its_reader(
    in_a_cycle: bool, tmp_path: Path
) -> None:
    (tmp_path / "shard").write_bytes(b"0123")
    target = bytearray(2)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranges = FileRanges(LocalFolder(tmp_path))
        assert ranges.read_into(memoryview(target), "shard", 1) == 2
        cycle: list[object] = [ranges]
        if in_a_cycle:
            cycle.append(cycle)
        del ranges, cycle
        gc.collect()
    assert target == b"12"
    assert [
        str(warning.message) for warning in caught if str(tmp_path) in str(warning.message)
    ] == []
