"""What qgate removes: its own files, by name, and nothing that a link leads to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgate.baselines.store import BASELINES
from qgate.drawing import files as drawings
from qgate.dumps import Record
from qgate.dumps.writing import DumpWriter
from qgate.engine.journal import Journal
from qgate.errors import QgateError
from qgate.storage.removing import clear, refuse_links, remove_files, remove_own_folder
from qgate.storage.updates import UPDATE, LocalFiles, write_update

Work = Callable[[Path], object]
NAMES = {
    "layer_type": "linear",
    "operation": "forward",
    "phase": "post",
    "component": "up",
    "name": "output",
}


def overwrite(home: Path) -> None:
    """Write a dump over one of two ranks."""
    DumpWriter(home, existing="overwrite").close()


def finish_update(home: Path) -> None:
    """Go on with an update that was killed, which removes a file."""
    name = "accepted/int8.txt"
    (home / UPDATE).write_bytes(write_update({name: None, BASELINES.first: b"new"}))
    LocalFiles(home, BASELINES).settle(0)


def draw(home: Path) -> None:
    drawings.check_folder(home)


# By feature: what it does, the folder that is a link, and names behind it that qgate uses, too.
FEATURES: dict[str, tuple[Work, str, list[str]]] = {
    "a dump that is written over": (overwrite, "rank00001", []),
    "an update of baselines": (finish_update, "accepted", ["int8.txt"]),
    "drawings": (draw, "statistics", ["tensors.csv"]),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_no_feature_removes_through_a_link(feature: str, tmp_path: Path) -> None:
    work, link, names = FEATURES[feature]
    home, precious = tmp_path / "home", tmp_path / "precious"
    if work is overwrite:
        for rank in (0, 1):
            with DumpWriter(home, rank=rank, world_size=2) as dump:
                dump.add(Record(order=0, rank=rank, **NAMES), torch.ones(3))
        (home / link).rename(precious)
    else:
        home.mkdir()
        precious.mkdir()
        for name in names:
            (precious / name).write_text("precious")
    (home / link).symlink_to(precious)
    before = {path: path.read_bytes() for path in precious.iterdir()}
    assert before
    with pytest.raises(
        QgateError, match=f"{link}' is a link, and nothing is .* through it: remove"
    ):
        work(home)
    assert {path: path.read_bytes() for path in precious.iterdir()} == before
    assert (home / link).is_symlink()


def test_a_journal_that_is_a_link_is_removed_as_a_link(tmp_path: Path) -> None:
    with Journal(tmp_path, {"a": 1}) as journal:
        name = journal.path.name
        journal.finish()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / name).symlink_to(tmp_path / "precious")
    with Journal(tmp_path, {"a": 1}) as journal:
        journal.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious").read_text() == "precious"


# The functions ----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that is reached through a link, as a user may give it, with a link in it."""
    for name in (
        "real/a/b/own.txt",
        "real/a/b/other",
        "real/own.txt",
        "real/c/own.txt",
        "far/own.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "real" / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "real" / "file").symlink_to(tmp_path / "far" / "own.txt")
    (tmp_path / "real" / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "given").symlink_to(tmp_path / "real")
    return tmp_path / "given"


def test_files_are_removed_by_name(home: Path) -> None:
    remove_files(home, "a/b/own.txt", "own.txt", "missing", "missing/own.txt", "lost", "file")
    assert sorted(path.name for path in home.iterdir()) == ["a", "c", "linked"]
    assert [path.name for path in (home / "a" / "b").iterdir()] == ["other"]
    assert (home.parent / "far" / "own.txt").exists(), "a link is removed as a link"
    with pytest.raises(QgateError, match="linked' is a link, and nothing is removed through it"):
        remove_files(home, "linked/own.txt")
    assert (home.parent / "far" / "own.txt").exists()


def test_a_folder_is_cleared_by_patterns(home: Path) -> None:
    clear(home.parent, "real", ["*/own.txt", "a/b/own.txt", "none/*", "*.none", "own.txt/x"])
    assert sorted(path.name for path in home.iterdir()) == [
        "a",
        "file",
        "linked",
        "lost",
        "own.txt",
    ]
    assert [path.name for path in (home / "a" / "b").iterdir()] == ["other"], "an empty `c` is gone"
    assert (home.parent / "far" / "own.txt").exists()
    clear(home.parent, "real", ["*"], keep=["own.txt"])
    assert sorted(path.name for path in home.iterdir()) == ["a", "own.txt"]


@pytest.mark.parametrize(("folder", "pattern"), [("given", "own.txt"), ("real", "linked/own.txt")])
def test_a_folder_behind_a_link_is_not_cleared(home: Path, folder: str, pattern: str) -> None:
    with pytest.raises(
        QgateError, match="is a link, and nothing is removed through it: remove the"
    ):
        clear(home.parent, folder, [pattern])
    assert (home / "own.txt").exists()
    assert (home.parent / "far" / "own.txt").exists()


def test_links_are_refused_below_the_folder_that_is_given(home: Path) -> None:
    refuse_links(home, "a/b/own.txt", "", "missing/x")
    for name in ("linked", "linked/x", "lost", "file"):
        with pytest.raises(QgateError, match="is a link, and nothing is written through it"):
            refuse_links(home, name, doing="written")


def test_a_folder_of_this_process_that_became_a_link_stays(home: Path) -> None:
    remove_own_folder(home / "linked")
    assert (home.parent / "far" / "own.txt").exists()
    remove_own_folder(home / "a")
    assert not (home / "a").exists()
