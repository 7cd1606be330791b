"""Killed, out of room, read-only, or two at once: the old or the new baseline, whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qgate import QgateError
from qgate.baselines import ReferenceTensor, Store, Update, verify
from qgate.storage.updates import LOCK, UPDATE, seal
from tests.baselines.building import (
    ORIGIN,
    OTHER_WEIGHTS,
    accepting,
    contents,
    key,
    large_update,
    marks,
    recorded,
    recording,
    state,
)
from tests.baselines.conftest import Clock
from tests.baselines.faults import (
    dying_at,
    ended,
    failing_from,
    in_child,
    interrupted_after,
    started,
    watching,
)
from tests.shares import proof, share

MOST_STEPS = 200


@pytest.fixture
def before(tmp_path: Path) -> Path:
    recorded(tmp_path / "before")
    return tmp_path / "before"


@pytest.fixture
def outcomes(before: Path, tmp_path: Path) -> tuple[object, object]:
    """What readers see before and after the large update."""
    shutil.copytree(before, tmp_path / "after")
    store = Store(tmp_path / "after", "tiny")
    old = state(store)
    store.commit(large_update())
    return old, state(store)


def killed(store: Store, update: Update, step: int, *, half: bool = False) -> int:
    """A commit in a child that dies at a step; 0 where it has fewer steps."""
    return dying_at(step, lambda: store.commit(update), half=half)


def fresh(before: Path, name: str) -> Store:
    root = before.parent / "runs" / name
    shutil.copytree(before, root)
    return Store(root, "tiny")


def is_clean(store: Store) -> bool:
    return not [name for name in contents(store.folder) if name.rpartition("/")[2].startswith(".")]


def accepted_marks(store: Store) -> dict[str, bytes]:
    return contents(store.folder / "accepted")


def read_only_look(store: Store) -> object:
    """What a reader sees, who changes nothing by looking."""
    touched = marks(store.folder)
    snapshot = state(store)
    assert marks(store.folder) == touched
    return snapshot


@proof
@pytest.mark.parametrize("half", [False, True], ids=["before a step", "in the middle of a write"])
def test_killed_at_every_step(before: Path, outcomes: tuple[object, object], half: bool) -> None:
    old, new = outcomes
    states = []
    for step in range(1, MOST_STEPS):
        store = fresh(before, str(step))
        died = killed(store, large_update(), step, half=half)
        states.append(new if (snapshot := read_only_look(store)) == new else old)
        assert snapshot in (old, new), step
        if not died:
            break
        assert died == -signal.SIGKILL
        origin = store.origin()
        assert origin is not None
        store.commit(accepting({key(): 0.75}, "later", origin))
        assert is_clean(store), step
        snapshot = state(store)
        later = snapshot.pop("later")
        assert later.values == {key(): 0.75}
        assert snapshot == states[-1], step
        assert not [problem for problem in verify(store) if "other weights" not in problem]
    assert step > 30
    assert snapshot == new
    switch = states.index(new)
    assert states == [old] * switch + [new] * (len(states) - switch)
    assert switch > 10
    assert len(states) - switch > 5


@proof
def test_killed_again_while_finishing_what_was_killed(
    before: Path, outcomes: tuple[object, object]
) -> None:
    new = outcomes[1]
    halfway = fresh(before, "halfway")
    untouched = accepted_marks(halfway)
    for step in range(1, MOST_STEPS):
        shutil.rmtree(halfway.folder.parent)
        halfway = fresh(before, "halfway")
        killed(halfway, large_update(), step)
        if (halfway.folder / UPDATE).exists() and accepted_marks(halfway) != untouched:
            break
    assert state(halfway) == new
    for second in range(1, MOST_STEPS):
        shutil.copytree(halfway.folder.parent, before.parent / "again" / str(second))
        store = Store(before.parent / "again" / str(second), "tiny")
        update = accepting({key(): 0.75}, "later", OTHER_WEIGHTS)
        died = killed(store, update, second)
        snapshot = dict(read_only_look(store))  # type: ignore[call-overload]
        later = snapshot.pop("later", None)
        assert snapshot == new, second
        assert later is None or later.values == {key(): 0.75}
        if not died:
            break
    assert later is not None
    assert second > 20
    assert is_clean(store)


@proof
def test_the_first_recording_killed_at_every_step(tmp_path: Path) -> None:
    existence = []
    for step in range(1, MOST_STEPS):
        store = Store(tmp_path / str(step) / "root", "tiny")
        died = killed(store, recording(), step)
        existence.append(store.exists())
        assert store.exists() == (store.origin() == ORIGIN)
        if not died:
            break
        store.commit(recording(seed=2))
        assert (store.reference("plain")["layers.0:output"].values).any()
        assert is_clean(store)
    assert existence == sorted(existence)
    assert existence[-1]


@share(2)
@pytest.mark.parametrize("once", [True, False], ids=["one call", "all calls from there"])
def test_a_full_disk_at_every_step(
    before: Path, outcomes: tuple[object, object], once: bool
) -> None:
    old, new = outcomes
    finished = []
    for step in range(1, MOST_STEPS):
        store = fresh(before, str(step))
        with failing_from(step, once=once) as step_names:
            try:
                store.commit(large_update())
                message = ""
            except QgateError as error:
                message = str(error)
        snapshot = read_only_look(store)
        finished.append(snapshot == new)
        assert snapshot in (old, new), step
        if message:
            assert "No space left on device" in message
            assert ("They are as they were" in message) == (snapshot == old), (step, message)
            assert ("is recorded and counts" in message) == (snapshot == new), (step, message)
            assert snapshot == new or is_clean(store), step
        else:
            assert snapshot == new
        store.commit(large_update())
        store.commit(accepting({key(): 1.0}, "later", OTHER_WEIGHTS))
        assert is_clean(store)
        if step > len(step_names):
            break
    assert not finished[0]
    assert finished[-1]
    assert finished.count(False) > 5
    assert once or finished == sorted(finished)


def test_interrupted_after_every_step(before: Path, outcomes: tuple[object, object]) -> None:
    old, new = outcomes
    finished = []
    for step in range(1, MOST_STEPS):
        store = fresh(before, str(step))
        with interrupted_after(step) as step_names:
            with contextlib.suppress(KeyboardInterrupt):
                store.commit(large_update())
            ended_early = len(step_names) >= step
        finished.append(read_only_look(store) == new)
        assert finished[-1] or read_only_look(store) == old, step
        store.commit(accepting({key(): 1.0}, "later", store.origin() or ORIGIN), timeout_s=5)
        assert is_clean(store), step
        if not ended_early:
            break
    assert finished == sorted(finished)
    assert not finished[0]
    assert finished[-1]


def test_what_waits_for_the_disk(before: Path) -> None:
    """A power cut may undo what was not synced: the update goes before its files, and they before
    it goes; the manifest is the last of them."""
    store = fresh(before, "order")
    paths: dict[int, str] = {}
    story: list[tuple[str, str]] = []

    def react(name: str, given: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        result = call()
        if name == "open":
            paths[result] = Path(given[0]).name
        elif name in ("write", "fsync"):
            story.append((name, paths[given[0]]))
        elif name in ("replace", "unlink"):
            story.append((name, Path(given[-1]).name))
        return result

    with watching(react):
        store.commit(large_update())
    update = story.index(("replace", UPDATE))
    staged = f".{UPDATE}.new"
    assert {name for call_name, name in story[:update] if call_name == "write"} - {LOCK} == {staged}
    assert story.index(("fsync", staged)) > story.index(("write", staged))
    assert ("fsync", "tiny") in story[:update]
    gone = story.index(("unlink", UPDATE))
    moved = [i for i, (action, _) in enumerate(story) if action == "replace" and update < i < gone]
    assert len(moved) == 4
    assert story[moved[-1]] == ("replace", "manifest.json")
    assert ("fsync", "tiny") in story[update : moved[0]]
    for index in moved:
        written = f".{story[index][1]}.new"
        assert story[:index].count(("fsync", written)) == 1
        assert story.index(("fsync", written)) > story.index(("write", written))
    for folder in ("tiny", "accepted"):
        assert ("fsync", folder) in story[moved[-1] : gone]


def test_a_new_folder_is_on_the_disk_before_it_counts(tmp_path: Path) -> None:
    story: list[str] = []

    def react(name: str, given: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if name in ("open", "mkdir", "replace"):
            story.append(f"{name} {Path(given[-1] if name == 'replace' else given[0]).name}")
        return call()

    with watching(react):
        recorded(tmp_path / "root")
    for parent, folder in (("root", "tiny"), ("tiny", "accepted")):
        mkdir_step = story.index(f"mkdir {folder}")
        assert story[mkdir_step + 1] == f"open {parent}"
        assert mkdir_step < story.index(f"replace {UPDATE}")


@pytest.mark.usefixtures("waiting")
def test_a_limit_of_the_system_in_the_middle_of_a_file(
    before: Path, outcomes: tuple[object, object]
) -> None:
    """The kernel itself cuts a write short, then refuses the rest."""
    store = fresh(before, "limited")
    message = before.parent / "message"

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        try:
            store.commit(large_update())
        except QgateError as error:
            message.write_text(str(error)[-200:])

    assert in_child(limited) == 0
    assert "File too large" in message.read_text()
    assert state(store) == outcomes[0]
    assert is_clean(store)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=["EROFS", "EACCES"])
def test_a_folder_that_is_read_only_by_its_system(before: Path, code: int) -> None:
    store = fresh(before, "read-only")
    touched = marks(store.folder)
    with (
        failing_from(1, once=False, code=code),
        pytest.raises(QgateError, match=f"could not be written: {os.strerror(code)}.*as they were"),
    ):
        store.commit(large_update())
    assert marks(store.folder) == touched
    with failing_from(1, once=False, code=code):
        assert store.commit(accepting({key(): 0.5}, "2-4")) == []


def test_a_folder_without_permission(before: Path) -> None:
    """Root may write everywhere, so as root the child becomes somebody else."""
    store = fresh(before, "read-only")
    old = state(store)
    closed = [store.folder, store.folder / "accepted"]
    modes = {path: path.stat().st_mode for path in [*closed, *store.folder.parents]}
    for path in modes:
        if path in closed:
            path.chmod(0o555)
        elif os.getuid() == 0 and not modes[path] & 0o001:
            path.chmod(modes[path] | 0o055)

    def other_user() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        assert state(store) == old
        with pytest.raises(QgateError, match=r"Permission denied .*as they were"):
            store.commit(large_update())

    try:
        assert in_child(other_user) == 0
    finally:
        for path, mode in modes.items():
            if path.stat().st_mode != mode:
                path.chmod(mode)
    assert state(store) == old


# Two at once -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("waiting")
def test_two_writers_lose_nothing(before: Path) -> None:
    store = fresh(before, "two")
    rounds = 12

    def writer(name: str) -> Callable[[], None]:
        def write() -> None:
            for number in range(rounds):
                Store(store.folder.parent, "tiny").commit(
                    accepting({key(f"{name}.{number}"): number + 0.5})
                )

        return write

    children = [started(writer(name)) for name in "abc"]
    assert [ended(child) for child in children] == [0, 0, 0]
    accepted = store.accepted("2-1")
    assert accepted is not None
    expected = {key(f"{n}.{i}"): i + 0.5 for n in "abc" for i in range(rounds)}
    assert {k: v for k, v in accepted.values.items() if k in expected} == expected
    assert len(accepted.values) == 12 + 3 * rounds
    assert is_clean(store)


def all_of(number: int) -> Update:
    """An update that changes the manifest, both references and two modes to one number."""
    update = Update(replace(ORIGIN, weights=f"{number}" * 64))
    for basis in ("plain", "rotated"):
        update.set_reference(basis, {"s": ReferenceTensor.of(np.full((40, 40), number, "f4"))})
    for mode in ("2-1", "2-4"):
        update.set_accepted(mode, key("s"), number)
    return update


@pytest.mark.usefixtures("waiting")
def test_a_reader_beside_a_writer_sees_whole_states(before: Path) -> None:
    """No lock is taken to read, and a look that was overtaken is taken again."""
    store = fresh(before, "beside")
    store.commit(all_of(1))
    enough = before / "enough"

    def write() -> None:
        number = 1
        while not enough.exists():
            number = 3 - number
            store.commit(all_of(number))

    child = started(write)
    readings: list[float] = []
    try:
        while len(readings) < 40 or {*readings} != {1.0, 2.0}:
            assert len(readings) < 100_000, "the writer changes nothing"
            for basis in ("plain", "rotated"):
                stored_values = set(store.reference(basis)["s"].values.ravel().tolist())
                assert len(stored_values) == 1
                readings += stored_values
            for mode in ("2-1", "2-4"):
                accepted = store.accepted(mode)
                assert accepted is not None
                assert accepted.values == {key("s"): float(accepted.weights[0])}
    finally:
        enough.touch()
        assert ended(child) == 0


def test_a_lock_that_is_held_names_its_holder(before: Path, clock: Clock) -> None:
    store = fresh(before, "held")
    with store.files.changing(1):
        old = contents(store.folder)
        with pytest.raises(
            QgateError, match=rf"updated by process {os.getpid()} on .* 0.1 s\. Run"
        ):
            store.commit(large_update(), timeout_s=0.1)
        assert 0.1 <= clock.slept < 0.5
        assert contents(store.folder) == old
        assert store.modes() == ["2-1", "2-4"]
    assert is_clean(store)
    store.commit(large_update(), timeout_s=0)


def test_a_lock_waits_for_its_turn(before: Path, clock: Clock) -> None:
    store = fresh(before, "waits")
    ready, go = os.pipe()
    waiting, waits = os.pipe()

    def hold() -> None:
        with store.files.changing(1):
            os.write(go, b"x")
            os.read(waiting, 1)
            store.folder.joinpath("seen").touch()

    child = started(hold)
    os.read(ready, 1)
    clock.sleep = lambda seconds: (os.write(waits, b"x"), time.sleep(seconds))  # type: ignore
    store.commit(large_update())
    assert (store.folder / "seen").exists()
    assert ended(child) == 0


def test_a_lock_file_that_was_removed_locks_nothing(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder went and another one came, between opening the file and locking it."""
    store = fresh(before, "removed")
    path = store.folder / LOCK
    real = fcntl.flock
    descriptors: list[int] = []

    def overtaken(handle: int, how: int) -> None:
        if not descriptors:
            path.unlink()
            descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT))
            real(descriptors[0], how)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(QgateError, match="updated by another process"), store.files.changing(0):
        raise AssertionError("two hold the lock")
    assert len(descriptors) == 1
    os.close(descriptors[0])
    with store.files.changing(0):
        assert path.exists()


def test_the_lock_of_a_dead_process_is_free(before: Path) -> None:
    store = fresh(before, "dead")

    def hold() -> None:
        with store.files.changing(1):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold) == -signal.SIGKILL
    assert (store.folder / LOCK).exists()
    store.commit(large_update(), timeout_s=0)
    assert is_clean(store)


# Updates that cannot be believed ---------------------------------------------------------------


@pytest.fixture(scope="module")
def once_cut_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose update was killed right after it came to count."""
    before = tmp_path_factory.mktemp("cut_off") / "before"
    recorded(before)
    for step in range(1, MOST_STEPS):
        store = fresh(before, str(step))
        killed(store, large_update(), step)
        if (store.folder / UPDATE).exists():
            return before.parent / "runs" / str(step)
    raise AssertionError("no update ever counted")


@pytest.fixture
def cut_off(once_cut_off: Path, tmp_path: Path) -> Store:
    shutil.copytree(once_cut_off, tmp_path / "cut_off")
    return Store(tmp_path / "cut_off", "tiny")


@proof
def test_an_update_that_cannot_finish_an_older_one_says_that_it_did_nothing(
    cut_off: Store, outcomes: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_from(1, once=False), pytest.raises(QgateError, match="as they were"):
        cut_off.commit(accepting({key(): 0.75}, "later", OTHER_WEIGHTS))
    assert state(cut_off) == outcomes[1]
    real = os.replace

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(QgateError, match=r"No space left .*as they were"):
        cut_off.commit(accepting({key(): 0.75}, "later", OTHER_WEIGHTS))
    assert state(cut_off) == outcomes[1]
    monkeypatch.setattr(os, "replace", real)
    cut_off.commit(accepting({key(): 0.75}, "later", OTHER_WEIGHTS))
    assert cut_off.modes() == ["2-1", "later", "new"]


def test_half_an_update_counts_as_none(cut_off: Store, outcomes: tuple[object, object]) -> None:
    path = cut_off.folder / UPDATE
    whole = path.read_bytes()
    head = whole.partition(b"\n")[0]
    assert state(cut_off) == outcomes[1]
    for part in (head[: len(head) // 2], b"", b"[]", head.replace(b"manifest", b"manifesto")):
        path.write_bytes(part)
        assert read_only_look(cut_off) == outcomes[0]
    cut_off.commit(accepting({key(): 0.75}, "later"))
    assert is_clean(cut_off)
    assert {k: v for k, v in state(cut_off).items() if k != "later"} == outcomes[0]


def test_an_update_that_was_changed_is_an_error(cut_off: Store) -> None:
    path = cut_off.folder / UPDATE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    before = contents(cut_off.folder)
    for attempt in (
        lambda: cut_off.accepted("new"),
        lambda: cut_off.commit(large_update()),
        lambda: cut_off.commit(accepting({key(): 0.75}, "later", OTHER_WEIGHTS)),
    ):
        with pytest.raises(QgateError, match=r"\.update' is the rest of .* Delete that file"):
            attempt()
    assert ".update" in verify(cut_off)[0]
    assert contents(cut_off.folder) == before
    path.unlink()
    cut_off.commit(accepting({key(): 0.75}, "later"))
    assert is_clean(cut_off)


def test_an_update_does_not_reach_out_of_its_folder(cut_off: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    name = "accepted/../../../../victim.txt"
    sealed = seal(1, {name: None})
    text = f'{{"version": 1, "files": {{"{name}": null}}, "sha256": "{sealed}"}}'
    (cut_off.folder / UPDATE).write_text(text)
    with pytest.raises(QgateError, match="none of a baseline"):
        cut_off.commit(large_update())
    assert victim.read_text() == "mine"


def test_an_update_of_a_newer_qgate_is_not_guessed_at(cut_off: Store) -> None:
    sealed = seal(2, {})
    (cut_off.folder / UPDATE).write_text(f'{{"version": 2, "files": {{}}, "sha256": "{sealed}"}}')
    with pytest.raises(
        QgateError, match="of version 2, and this qgate reads version 1: finish it with"
    ):
        cut_off.origin()
