"""What a killed update leaves goes with the next run, also with one that has nothing to change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from qgate import QgateError
from qgate.baselines import Candidate, Store, drop_candidate, write_candidate
from qgate.storage.files import lock
from qgate.storage.updates import LOCK, UPDATE
from tests.baselines.building import ORIGIN, accepting, contents, key, marks, recorded
from tests.baselines.conftest import Clock
from tests.baselines.faults import dying_at, failing_from
from tests.shares import proof

MOST_STEPS = 60


def hidden(store: Store) -> list[str]:
    return [name for name in contents(store.folder) if name.rpartition("/")[2].startswith(".")]


def killed(root: Path, step: int) -> tuple[Store, int]:
    store = recorded(root / str(step))
    update = accepting({key(): 3.0})
    return store, dying_at(step, lambda: store.commit(update))


@pytest.fixture
def promised(tmp_path: Path) -> Store:
    """An update that counts, none of whose files is in its place."""
    for step in range(1, MOST_STEPS):
        store, died = killed(tmp_path, step)
        assert died == -signal.SIGKILL, "it comes to count before the end"
        if (store.folder / UPDATE).exists():
            return store
    raise AssertionError("no update was promised")


@proof
@pytest.mark.parametrize("verb", ["commit", "tidy"])
def test_the_same_again_at_every_step(tmp_path: Path, verb: str) -> None:
    idle = 0
    for step in range(1, MOST_STEPS):
        store, died = killed(tmp_path, step)
        if verb == "tidy":
            store.tidy()
        else:
            idle += store.commit(accepting({key(): 3.0})) == []
        assert hidden(store) == [], step
        accepted = store.accepted("2-1")
        assert accepted is not None
        text = (store.folder / "accepted" / "2-1.txt").read_text()
        assert (accepted.values[key()] == 3.0) == ("3.0" in text), "what counts is in its place"
        if not died:
            break
    assert step > 10
    assert verb == "tidy" or idle > 3


def test_without_leftovers_nothing_is_written(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = marks(store.folder)
    with failing_from(1, once=False) as step_names:
        assert store.commit(accepting({key(): store.accepted("2-1").values[key()]})) == []  # type: ignore[union-attr]
        assert store.tidy() == []
    assert step_names == []
    assert marks(store.folder) == before


@proof
def test_what_cannot_be_finished_counts_where_it_is(promised: Store, clock: Clock) -> None:
    """Nothing is to be changed: a folder without room, or another writer, is no reason to fail."""
    before = contents(promised.folder)
    with failing_from(1, once=False):
        assert promised.commit(accepting({key(): 3.0})) == []
    assert contents(promised.folder) == before
    with failing_from(1, once=False), pytest.raises(QgateError, match="No space left"):
        promised.tidy()
    with lock(promised.folder / LOCK, 1, "it is"):
        assert promised.commit(accepting({key(): 3.0})) == []
        assert clock.slept == 0, "a writer is not waited for"
    assert promised.commit(accepting({key(): 3.0})) == []
    assert hidden(promised) == []


def test_a_candidate_that_was_cut_off_goes_with_it(tmp_path: Path) -> None:
    candidate = Candidate(ORIGIN, "2-1", "test_it", {key(): 1.0})
    path = write_candidate(tmp_path, candidate)
    (tmp_path / f".{path.name}.part").write_text("half")
    drop_candidate(tmp_path, ORIGIN.model, "2-1", "test_it")
    assert list(tmp_path.iterdir()) == []
