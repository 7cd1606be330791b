"""Files made on purpose are refused: what blows up, what would run, what leads out of its folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from qgate.baselines import Store
from qgate.dumps.tensor_files import expand
from qgate.engine.journal import Journal
from qgate.errors import QgateError
from qgate.storage.files import lock
from tests.baselines.building import accepting, key, recorded
from tests.campaigns.fuzzing.guard import ROOM, guarded
from tests.campaigns.fuzzing.hostile import BLOW_UPS, OUT, READ, RUNS, Runs
from tests.campaigns.fuzzing.table import TARGETS
from tests.campaigns.fuzzing.target import run_folder, warmed
from tests.shares import share

ALL = {**BLOW_UPS, **RUNS, **OUT}


def test_no_name_is_there_twice() -> None:
    assert len(ALL) == len(BLOW_UPS) + len(RUNS) + len(OUT)
    assert set(ALL) >= READ


@share(8)
@pytest.mark.parametrize("name", ALL)
def test_it_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target, change = ALL[name]
    warmed(TARGETS[target])
    outcome = run_folder(TARGETS[target], change, tmp_path)
    assert outcome.wrong == ""
    assert bool(outcome.said) == (name not in READ)
    assert "Traceback" not in outcome.said


# The guard itself --------------------------------------------------------------------------------


def _loop() -> None:
    while True:
        pass


def test_the_guard_sees_what_it_is_there_for(tmp_path: Path) -> None:
    canary, outside = tmp_path / "canary", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    blocks: list[bytes] = []
    bad = {
        "KeyError": lambda: {}["x"],
        "took more than": _loop,
        "MB for": lambda: blocks.append(bytes(2 * ROOM) + b"x"),
        "opened": lambda: (outside / "secret").read_text(),
        "code of the file ran": canary.touch,
        "os.system": lambda: os.system("true"),
    }
    for word, read in bad.items():
        seconds = 0.5 if read is _loop else 30.0
        outcome = guarded(read, size=1, outside=outside, canary=canary, seconds=seconds)
        assert word in outcome.wrong
    assert not guarded(lambda: None, size=1, outside=outside, canary=canary).wrong

    def refuse() -> None:
        raise QgateError("no")

    assert guarded(refuse, size=1).said == "QgateError: no"


def test_the_canary_sings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that unpickles would be seen."""
    import pickle

    monkeypatch.chdir(tmp_path)
    outcome = guarded(
        lambda: pickle.loads(pickle.dumps(Runs())), size=1, canary=tmp_path / "canary"
    )
    assert "code of the file ran" in outcome.wrong


def test_a_store_that_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with a pattern on a store without credentials, and with half a character in a name."""
    import fsspec

    def no_one(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials")

    # The class that is in use: a run of pytest inside another test may have imported it anew.
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "glob", no_one)
    with pytest.raises(QgateError, match="cannot be reached: no credentials"):
        expand(["memory://x/*.pt"])
    with contextlib.suppress(QgateError):
        expand(["a*\ud884/*/x.pt"])


# Links where something is written ----------------------------------------------------------------


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A repository of others may have links under the names that an update writes to."""
    store = recorded(tmp_path / "b")
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    for name in ("accepted/.2-4.txt.new", ".manifest.json.new"):
        (store.folder / name).symlink_to(target)
    store.commit(accepting({key(): 0.25}, "2-4"))
    assert target.read_text() == "mine"
    assert Store(tmp_path / "b", "tiny").accepted("2-4").values[key()] == 0.25  # type: ignore[union-attr]


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    store = recorded(tmp_path / "b")
    (store.folder / "accepted").rename(tmp_path / "elsewhere")
    (store.folder / "accepted").symlink_to(tmp_path / "elsewhere")
    before = {path.name: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()}
    with pytest.raises(QgateError, match="is a link, and nothing is written through it"):
        store.commit(accepting({key(): 0.25}, "2-4"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()} == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(QgateError, match="is a link"), lock(tmp_path / ".lock", 1.0, "x are"):
        pass
    assert target.read_text() == "mine"


def test_a_journal_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    with Journal(tmp_path, 1) as first_journal:
        path = first_journal.path
    path.unlink()
    path.symlink_to(target)
    with Journal(tmp_path, 1) as journal:
        journal.record("a", 1)
    assert target.read_text() == "mine"
