"""Baselines in a store of objects: the promises of a folder, or a refusal that says why."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import s3fs

from qgate.baselines import (
    Candidate,
    Store,
    stored_models,
    unused,
    verify,
    write_candidate,
)
from qgate.baselines.store import check_root, folders
from qgate.cli import main
from qgate.errors import QgateError
from qgate.storage.bucket_files import _CACHE, GENERATIONS, OBJECTS
from qgate.storage.locations import location_of
from qgate.storage.updates import EVERYTHING, LOCK, OLD_UPDATE, seal
from tests import bucket as stores
from tests import warm
from tests.baselines.building import (
    ORIGIN,
    OTHER_WEIGHTS,
    accepting,
    contents,
    dropping,
    key,
    large_update,
    recorded,
    recording,
    state,
    tensors,
)
from tests.shares import proof, share

if TYPE_CHECKING:
    from qgate.storage.locations import Location

bucket, memory, server = stores.bucket, stores.memory, stores.server
BUCKET, keys, log_in = stores.BUCKET, stores.keys, stores.log_in

# A run does a third of the cases of all tests here: requests to stores take most of their time.
pytestmark = share(3, group="stores")
Capsys = pytest.CaptureFixture[str]
MOST_STEPS = 120
BUCKET_ROOT = f"s3://{BUCKET}/base"
MEMORY_ROOT = "memory://bucket/base"


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Location:
    """An empty place of either store."""
    request.getfixturevalue("memory" if request.param == "memory" else "bucket")
    return location_of(MEMORY_ROOT if request.param == "memory" else BUCKET_ROOT)


def again(store: Store) -> Store:
    """What another process has of it: nothing in memory."""
    _CACHE.clear()
    return Store(store.folder.parent, store.model)


def objects(store: Store) -> dict[str, bytes]:
    """All that is in the store, machinery included."""
    fs, start = store.files._fs, f"{store.files._root}/"  # type: ignore[union-attr]
    return {name.removeprefix(start): bytes(fs.cat_file(name)) for name in fs.find(start)}


def files(store: Store) -> dict[str, bytes]:
    """The files of a baseline, wherever they lie."""
    return store.files.read(EVERYTHING)[0]


def newest(store: Store) -> str:
    """The name of the highest generation."""
    return max(name for name in objects(store) if name.startswith(f"{GENERATIONS}/"))


def object_of(store: Store, name: str) -> str:
    """The name of the object that a file is in."""
    entry = json.loads(objects(store)[newest(store)])["files"][name]
    return f"{OBJECTS}/{entry[1]}"


def copied(here: Store, root: Location) -> Store:
    """A folder as somebody copies it into a bucket, file by file."""
    for name, data in contents(here.folder).items():  # type: ignore[arg-type]
        (root / "tiny" / name).write_bytes(data)
    return Store(root, "tiny")


# The same as in a folder -----------------------------------------------------------------------


def test_it_is_what_a_folder_has(root: Location, tmp_path: Path) -> None:
    there, here = recorded(root), recorded(tmp_path)
    assert files(there) == files(here) == contents(here.folder)  # type: ignore[arg-type]
    assert state(again(there)) == state(here)
    assert there.exists()
    assert verify(again(there)) == []
    for store in (there, here):
        assert store.commit(large_update()) != []
    assert files(there) == files(here) == contents(here.folder)  # type: ignore[arg-type]
    assert state(there) == state(again(there)) == state(here)
    assert stored_models(root) == ["tiny"]


def test_objects_are_named_by_what_they_hold_and_generations_by_number(root: Location) -> None:
    store = recorded(root)
    store.commit(large_update())
    names = objects(store)
    assert [name for name in names if not name.startswith(f"{OBJECTS}/")] == [
        f"{GENERATIONS}/000001.json",
        f"{GENERATIONS}/000002.json",
    ]
    for name, data in names.items():
        if name.startswith(f"{OBJECTS}/"):
            assert name == f"{OBJECTS}/{hashlib.sha256(data).hexdigest()}"


def test_a_copied_folder_is_read_and_migrated(
    root: Location, tmp_path: Path, capsys: Capsys
) -> None:
    here = recorded(tmp_path)
    there = copied(here, root)
    assert verify(there) == []
    assert state(there) == state(here)
    assert there.files.stats().keys() == here.files.stats().keys()
    before = objects(there)
    with pytest.raises(QgateError, match=r"`qgate baselines migrate --baselines .* --model tiny`"):
        there.commit(accepting({key(): 3.0}))
    assert objects(there) == before
    assert main(["baselines", "migrate", "--baselines", str(root)]) == 0
    assert "tiny: 5 files migrated" in capsys.readouterr().out
    assert files(there) == contents(here.folder)  # type: ignore[arg-type]
    assert verify(there) == []
    assert all(name.startswith((OBJECTS, GENERATIONS)) for name in objects(there))
    assert there.commit(accepting({key(): 3.0})) != []
    assert main(["baselines", "migrate", "--baselines", str(root), "--model", "tiny"]) == 0
    assert "tiny: nothing to migrate" in capsys.readouterr().out
    assert main(["baselines", "migrate", "--baselines", str(tmp_path)]) == 0
    assert "tiny: nothing to migrate" in capsys.readouterr().out


def test_baselines_are_copied_to_a_folder_and_back(
    root: Location, tmp_path: Path, capsys: Capsys
) -> None:
    here = recorded(tmp_path / "a")
    (here.folder / "notes.md").write_text("not of it")  # type: ignore[union-attr]
    verb = ["baselines", "migrate", "--baselines"]
    assert main([*verb, str(tmp_path / "a"), "--to", str(root)]) == 0
    assert f"tiny: 5 files migrated to {root}" in capsys.readouterr().out
    assert main([*verb, str(root), "--to", str(tmp_path / "b")]) == 0
    back = Store(tmp_path / "b", "tiny")
    assert state(back) == state(Store(root, "tiny")) == state(here)
    assert verify(back) == []
    assert {**contents(back.folder), "notes.md": b"not of it"} == contents(here.folder)  # type: ignore[arg-type]
    before = objects(Store(root, "tiny"))
    for target in (root, tmp_path / "b"):
        assert main([*verb, str(tmp_path / "a"), "--to", str(target)]) == 2
        assert "there is a baseline of tiny in" in capsys.readouterr().err
    assert objects(Store(root, "tiny")) == before


def test_migrating_killed_at_every_step(tmp_path: Path, memory: Any) -> None:  # noqa: ARG001
    here = recorded(tmp_path)
    root = location_of(MEMORY_ROOT)
    for step in range(1, MOST_STEPS):
        store = copied(here, root / str(step))
        died = is_killed(lambda store=store, step=step: dying(store, step).files.migrate())  # type: ignore[misc]
        assert state(again(store)) == state(here), step
        again(store).files.migrate()
        assert state(again(store)) == state(here), step
        store.tidy()
        assert verify(store) == [], step
        assert all(name.startswith((OBJECTS, GENERATIONS)) for name in objects(store)), step
        if not died:
            break
    assert step > 10


def test_an_earlier_qgate_is_waited_for(root: Location, tmp_path: Path) -> None:
    store = copied(recorded(tmp_path), root)
    (store.folder / LOCK).write_bytes(b"process 7 on there, 2020-02-03 04:05:06, abcd")
    with pytest.raises(QgateError, match="an earlier qgate updates these baselines"):
        store.files.migrate()
    assert store.files.unlock() == "process 7 on there, 2020-02-03 04:05:06"
    (store.folder / OLD_UPDATE).write_bytes(b"{}")
    for attempt in (store.origin, store.files.migrate):
        with pytest.raises(QgateError, match="is the rest of an update by an earlier qgate"):
            attempt()
    (store.folder / OLD_UPDATE).unlink()
    assert store.files.migrate() == 5


def test_verbs_of_the_library(root: Location) -> None:
    store = recorded(root)
    measured = {"2-1": {("test_layer_outputs", "layers.0:output", "local")}}
    assert len(unused(store, measured)["2-1"]) == 11
    assert [change.file for change in store.commit(dropping("2-4", key()))] != []
    assert again(store).modes() == ["2-1"]
    assert store.commit(accepting({key(): 1e-4})) == []


def test_a_changed_object_is_seen_by_a_reader_that_was_there_before(root: Location) -> None:
    store = recorded(root)
    assert store.accepted("2-4").values == {key(): 0.5}  # type: ignore[union-attr]
    again(store).commit(accepting({key(): 0.75}, "2-4"))
    assert store.accepted("2-4").values == {key(): 0.75}  # type: ignore[union-attr]


def test_damage_is_an_error_and_no_tensor_is_believed(root: Location) -> None:
    store = recorded(root)
    name = object_of(store, "reference-plain.safetensors")
    whole = objects(store)[name]
    (store.folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(QgateError, match=r"of reference-plain.safetensors is damaged: its SHA-256"):
        again(store).reference("plain")
    (store.folder / object_of(store, "accepted/2-4.txt")).unlink()
    with pytest.raises(QgateError, match=r"of accepted/2-4.txt is missing"):
        again(store).accepted("2-4")
    assert len(verify(store)) == 3, "both bases have the same tensors, in one object"
    assert again(store).accepted("2-1") is not None
    again(store).commit(recording())
    assert len(verify(store)) == 1
    with pytest.raises(QgateError, match=r"of accepted/2-4.txt is missing"):
        again(store).commit(accepting({key(): 3.0}, "2-4"))


@pytest.mark.parametrize("data", [b"", b"{", b'{"version": 1, "files": {}, "sha256": "0"}', b"[]"])
def test_a_torn_generation_names_the_one_before(root: Location, data: bytes) -> None:
    store = recorded(root)
    old = state(store)
    store.commit(large_update())
    torn = store.folder / newest(store)
    torn.write_bytes(data)
    for attempt in (store.origin, lambda: store.commit(accepting({key(): 3.0}))):
        with pytest.raises(
            QgateError, match=r"000002.json' is damaged.* before it is generations/000001.json"
        ):
            attempt()
    assert "000002.json' is damaged" in verify(store)[0]
    torn.unlink()
    assert state(again(store)) == old
    assert store.commit(large_update()) != []


def test_a_generation_of_a_newer_qgate_is_not_guessed_at(root: Location) -> None:
    store = recorded(root)
    record = json.dumps({"version": 2, "files": {}, "sha256": seal(2, {})})
    (store.folder / GENERATIONS / "000002.json").write_bytes(record.encode())
    with pytest.raises(QgateError, match="update qgate"):
        store.origin()


def test_what_is_read_again_is_asked_for_once(root: Location) -> None:
    store = again(recorded(root))
    asked: list[str] = []

    class Counting(Dying):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self._fs, name)
            return self._read if name == "cat_file" else found

        def _read(self, path: str, **ranged: int) -> Any:
            asked.append(path.rpartition("/")[2])
            return self._fs.cat_file(path, **ranged)

    real = store.files._fs  # type: ignore[union-attr]
    store.files._fs = Counting(real, 1)  # type: ignore[union-attr]
    for _ in range(3):
        assert store.accepted("2-1") is not None
        assert store.accepted("2-4") is not None
        assert store.origin() is not None
    store.files._fs = real  # type: ignore[union-attr]
    names = {object_of(store, name).partition("/")[2]: name for name in files(store)}
    assert sorted(names[name] for name in asked if name in names) == [
        "accepted/2-1.txt",
        "accepted/2-4.txt",
        "manifest.json",
    ]


# Cut off ---------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Dying:
    """A store as a process has it that is killed before its step of this number."""

    def __init__(self, fs: Any, step: int) -> None:
        self._fs, self._left = fs, step

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if name not in ("pipe_file", "cp_file", "rm_file"):
            return found if self._left else self._dead
        return lambda *given, **more: self._step(found, *given, **more)

    def _step(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        self._left = max(self._left - 1, 0)
        return call(*given, **more) if self._left else self._dead()

    def _dead(self, *_: Any, **__: Any) -> Any:
        raise Killed


def dying(store: Store, step: int) -> Store:
    made = again(store)
    made.files._fs = Dying(made.files._fs, step)  # type: ignore[union-attr]
    return made


def is_killed(work: Callable[[], object]) -> bool:
    try:
        work()
    except Killed:
        return True
    return False


def test_killed_at_every_step(root: Location) -> None:
    after = recorded(root / "after")
    old = state(after)
    after.commit(large_update())
    new = state(after)
    seen = []
    for step in range(1, MOST_STEPS, 1 if str(root) == MEMORY_ROOT else 5):
        store = recorded(root / str(step))
        died = is_killed(partial(dying(store, step).commit, large_update()))
        found = state(again(store))
        assert found in (old, new), step
        seen.append(found == new)
        if not died:
            break
        origin = store.origin()
        assert origin is not None
        again(store).commit(accepting({key(): 0.75}, "later", origin))
        again(store).tidy()
        assert not [name for name in objects(store) if name.rpartition("/")[2].startswith(".")]
        found = state(again(store))
        assert found.pop("later").values == {key(): 0.75}
        assert found == (new if seen[-1] else old), step
        assert not [problem for problem in verify(store) if "other weights" not in problem]
    assert seen == sorted(seen)
    assert step > 8
    assert found == new


def test_the_rest_of_an_update_is_told_and_removed_by_prune(root: Location, capsys: Capsys) -> None:
    store = recorded(root)
    held = set(objects(store))
    is_killed(lambda: dying(store, 6).commit(large_update()))
    before = state(store)
    left = sorted(set(objects(store)) - held)
    assert len(left) == 2
    assert [name in " ".join(verify(store)) for name in left] == [True, True]
    baselines = ["--baselines", str(root)]
    assert main(["baselines", "prune", "--mode", "2-4", "--dry-run", *baselines]) == 0
    assert set(left) <= set(objects(store))
    assert main(["baselines", "prune", "--mode", "2-4", *baselines]) == 0
    assert capsys.readouterr().out.count("was cut off removed") == 2
    assert not set(left) & set(objects(store))
    before.pop("2-4")
    assert state(store) == before


def test_prune_keeps_this_state_and_the_one_before(root: Location) -> None:
    store = recorded(root)
    states = [state(store)]
    for value in (1.0, 2.0, 3.0):
        store.commit(accepting({key(): value}))
        states.append(state(store))
    assert verify(store) == []
    before = objects(store)
    assert store.commit(accepting({key(): 3.0})) == []
    assert objects(store) == before
    assert store.tidy() == []
    assert len([name for name in objects(store) if name.startswith(OBJECTS)]) == 3 + 2
    assert state(again(store)) == states[-1]
    (store.folder / newest(store)).unlink()
    assert state(again(store)) == states[-2]


def test_what_prune_removes_and_an_update_needs_is_put_back(root: Location) -> None:
    """Going back to older errors: their object is there before, and removed by somebody."""
    store = recorded(root)
    for value in (1.0, 2.0, 3.0):
        store.commit(accepting({key(): value}))

    class Between(Dying):
        """Another writer comes in before the first step of this kind."""

        def __init__(self, fs: Any, name: str, work: Callable[[], object]) -> None:
            super().__init__(fs, 10**6)
            self._name, self._work = name, [work]

        def _step(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
            if self._name in given[0] and self._work:
                self._work.pop()()
            return call(*given, **more)

    tidier = again(store)
    tidier.files._fs = Between(  # type: ignore[union-attr]
        tidier.files._fs,  # type: ignore[union-attr]
        OBJECTS,
        lambda: store.commit(accepting({key(): 1.0})),
    )
    tidier.tidy()
    assert again(store).accepted("2-1").values[key()] == 1.0  # type: ignore[union-attr]
    assert verify(store) == []
    for value in (2.0, 3.0):
        store.commit(accepting({key(): value}))
    writer = again(store)
    writer.files._fs = Between(writer.files._fs, f"{GENERATIONS}/", store.tidy)  # type: ignore[union-attr]
    writer.commit(accepting({key(): 1.0}))
    assert again(store).accepted("2-1").values[key()] == 1.0  # type: ignore[union-attr]
    assert verify(store) == []


def test_a_put_that_fails_leaves_what_was_there(root: Location) -> None:
    store = recorded(root)
    before = objects(store)
    for step in range(1, 6):
        broken = again(store)
        fs = broken.files._fs  # type: ignore[union-attr]
        broken.files._fs = Failing(fs, step)  # type: ignore[union-attr]
        with pytest.raises(QgateError, match=r"could not be written: Slow down.*They are as they"):
            broken.commit(large_update())
        store.tidy()
        assert objects(store) == before, step


class Failing(Dying):
    """A store that takes nothing new from a step on."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        return partial(self._step, found) if name == "pipe_file" else found

    def _step(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        self._left -= 1
        return call(*given, **more) if self._left > 0 else self._dead()

    def _dead(self, *_: Any, **__: Any) -> Any:
        raise OSError(5, "Slow down")


def test_an_answer_that_is_lost_is_no_failure(root: Location) -> None:
    store = recorded(root)
    expected = recorded(root / "expected")
    expected.commit(large_update())

    class Lossy(Failing):
        def _step(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
            call(*given, **more)
            if GENERATIONS in given[0]:
                raise OSError(5, "Connection reset")

    broken = again(store)
    broken.files._fs = Lossy(broken.files._fs, 1)  # type: ignore[union-attr]
    assert broken.commit(large_update()) != []
    assert files(again(store)) == files(expected)
    assert len([name for name in objects(store) if name.startswith(GENERATIONS)]) == 2


# Two at once -----------------------------------------------------------------------------------


def test_who_comes_second_writes_on_top_of_the_first(root: Location) -> None:
    store, other = recorded(root), again(recorded(root / "x"))
    other = again(store)
    real = other.files._advance  # type: ignore[union-attr]
    first = [lambda: store.commit(accepting({key("other"): 7.0}))]

    def overtaken(*given: Any) -> bool:
        while first:
            first.pop()()
        return bool(real(*given))

    other.files._advance = overtaken  # type: ignore[union-attr, method-assign]
    assert [change.new for change in other.commit(accepting({key(): 3.0}))] == [3.0]
    values = again(store).accepted("2-1").values  # type: ignore[union-attr]
    assert (values[key()], values[key("other")]) == (3.0, 7.0)


def test_an_update_that_never_comes_in_between_says_so(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = recorded(root)
    before = state(store)
    monkeypatch.setattr(type(store.files), "_advance", lambda *_: False)
    with pytest.raises(
        QgateError, match=r"updated by somebody else all the time, .* within 0\.1 s"
    ):
        store.commit(accepting({key(): 3.0}), timeout_s=0.1)
    assert state(store) == before


def test_the_lock_of_an_earlier_qgate_is_removed(root: Location, capsys: Capsys) -> None:
    store = recorded(root)
    verb = ["baselines", "unlock", "--baselines", str(root), "--model", "tiny"]
    (store.folder / LOCK).write_bytes(b"process 7 on there, 2020-02-03 04:05:06, abcd")
    store.commit(accepting({key(): 3.0}))
    assert main(verb) == 0
    assert (
        "tiny: the lock of process 7 on there, 2020-02-03 04:05:06 removed"
        in capsys.readouterr().out
    )
    assert main(verb) == 0
    assert "tiny: nobody has a lock" in capsys.readouterr().out


def commit_many(url: str, number: int, count: int) -> None:
    for i in range(count):
        Store(location_of(url), "tiny").commit(accepting({key(f"w{number}.{i}:output"): 1.0 + i}))


@proof
@pytest.mark.usefixtures("bucket")
def test_many_writers_and_a_reader_lose_nothing_and_see_no_mixture() -> None:
    store = recorded(location_of(BUCKET_ROOT))
    given = [(BUCKET_ROOT, number, 4) for number in range(2)]
    writers = [warm.context().Process(target=commit_many, args=each) for each in given]
    for each in writers:
        each.start()
    counts = []
    while any(each.is_alive() for each in writers):
        found = again(store).accepted("2-1")
        assert found is not None
        counts.append(len(found.values))
        assert len(again(store).reference("rotated")) == 2
    assert [each.exitcode for each in writers] == [0, 0]
    assert counts == sorted(counts)
    assert len(again(store).accepted("2-1").values) == 12 + 8  # type: ignore[union-attr]
    assert verify(store) == []


def test_a_reader_between_two_updates_sees_one_of_them(root: Location) -> None:
    """The reference changes between the listing and the reading of it."""
    store, other = recorded(root), Store(root, "tiny")
    update = recording(OTHER_WEIGHTS, seed=1)
    fs = other.files._fs  # type: ignore[union-attr]

    class Slow(Failing):
        def __getattr__(self, name: str) -> Any:
            if name == "cat_file" and self._left:
                self._left = 0
                store.commit(update)
            return getattr(self._fs, name)

    other.files._fs = Slow(fs, 1)  # type: ignore[union-attr]
    found = other.reference("plain")
    assert [
        all((found[site].values == each.values).all() for site, each in tensors(seed).items())
        for seed in (0, 1)
    ] in ([True, False], [False, True])


# What cannot be reached, and what is refused ---------------------------------------------------


def attempts(place: Location) -> Iterator[Callable[[], object]]:
    yield lambda: check_root(place, False)
    yield lambda: stored_models(place)
    yield lambda: Store(place, "tiny").origin()
    yield lambda: Store(place, "tiny").commit(recording())
    yield lambda: verify_or_raise(Store(place, "tiny"))


def verify_or_raise(store: Store) -> None:
    raise QgateError(verify(store)[0])


@pytest.mark.usefixtures("bucket")
def test_a_bucket_that_is_not_there(capsys: Capsys) -> None:
    for attempt in attempts(location_of("s3://nobucket/base")):
        with pytest.raises(QgateError, match=r"'s3://nobucket/base.*' cannot be reached: The spec"):
            attempt()
    assert main(["baselines", "list", "--baselines", "s3://nobucket/base"]) == 2
    assert "bucket does not exist" in capsys.readouterr().err


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    log_in("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for attempt in attempts(location_of("s3://elsewhere/base")):
        with pytest.raises(
            QgateError, match="cannot be reached: Could not connect to the endpoint"
        ):
            attempt()


def test_nobody_is_logged_in(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(server, monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(QgateError, match="cannot be reached: Unable to locate credentials"):
        check_root(location_of(BUCKET_ROOT), False)


def denied(*names: str) -> Callable[..., Any]:
    """A call to S3 that answers some methods as a policy would that forbids them."""
    from botocore.exceptions import ClientError

    real = s3fs.S3FileSystem._call_s3

    async def call(self: Any, method: str, *given: Any, **more: Any) -> Any:
        if method in names:
            from s3fs.errors import translate_boto_error

            error = {"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}
            raise translate_boto_error(ClientError(error, method))
        return await real(self, method, *given, **more)

    return call


@pytest.mark.usefixtures("bucket")
def test_what_may_be_read_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = recorded(location_of(BUCKET_ROOT))
    before = objects(store)
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", denied("put_object"))
    assert len(state(again(store))) == 7
    check_root(store.folder.parent, False)
    with pytest.raises(QgateError, match=r"no baselines can be written in .*: Access Denied; see"):
        check_root(store.folder.parent, True)
    with pytest.raises(QgateError, match=r"could not be written: Access Denied.*as they were: see"):
        store.commit(large_update())
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", denied("list_objects_v2", "get_object"))
    with pytest.raises(QgateError, match="cannot be reached: Access Denied"):
        again(store).origin()
    monkeypatch.undo()
    assert objects(store) == before


def test_a_store_that_overwrites_what_must_be_new_is_refused(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that speak S3 and do not know writes on condition take them for plain ones."""
    store = recorded(location_of(BUCKET_ROOT))
    before = objects(store)
    real = s3fs.S3FileSystem._call_s3

    async def call(self: Any, method: str, *given: Any, **more: Any) -> Any:
        more.pop("IfNoneMatch", None)
        return await real(self, method, *given, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    for attempt in (
        lambda: store.commit(large_update()),
        lambda: check_root(store.folder.parent, True),
    ):
        with pytest.raises(QgateError, match="s3:// store does not say whether an object is new"):
            attempt()
    monkeypatch.undo()
    assert objects(store) == before
    assert not [name for name in keys(bucket) if ".probe" in name]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Location]:
    """The folder of a test behind a web server."""
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield location_of(f"http://127.0.0.1:{web.server_port}")
    web.shutdown()


def test_what_is_behind_a_web_server_is_read_and_not_written(
    tmp_path: Path, served: Location
) -> None:
    here = recorded(tmp_path)
    store = Store(served, "tiny")
    check_root(served, False)
    assert store.origin() == here.origin()
    assert store.accepted("2-1") == here.accepted("2-1")
    assert store.accepted("none") is None
    assert store.reference("plain").keys() == here.reference("plain").keys()
    for attempt in (lambda: store.commit(large_update()), lambda: check_root(served, True)):
        with pytest.raises(QgateError, match="http:// may leave half a file behind"):
            attempt()
    for attempt in (lambda: folders(served), store.modes, store.files.stats):  # type: ignore[assignment]
        with pytest.raises(QgateError, match="cannot be listed by http://"):
            attempt()
    assert state(here) == state(Store(tmp_path, "tiny"))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("updates", [0, 1, 2, 6])
def test_a_bucket_behind_a_web_server_is_read(
    tmp_path: Path, served: Location, updates: int
) -> None:
    there = recorded(location_of(MEMORY_ROOT))
    for number in range(updates):
        there.commit(accepting({key(): number + 1.0}))
    for name, data in objects(there).items():
        path = tmp_path / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    store = Store(served, "tiny")
    assert state(again(store)) == state(there)
    assert store.files.stats().keys() == there.files.stats().keys()
    with pytest.raises(QgateError, match="http:// may leave half a file behind"):
        store.commit(large_update())


# The command -----------------------------------------------------------------------------------


def test_the_verbs(root: Location, tmp_path: Path, capsys: Capsys) -> None:
    store = recorded(root)
    there = ["--baselines", str(root)]
    assert main(["baselines", "list", *there]) == 0
    text = capsys.readouterr().out
    assert f"tiny  ({store.folder})" in text
    assert "plain, rotated; 4 tensors" in text
    assert "file of 20" in text
    assert main(["baselines", "verify", *there]) == 0
    made = Candidate(ORIGIN, "2-4", "test_a", {key(): 0.25})
    write_candidate(tmp_path, made)
    for dry in (["--dry-run"], []):
        before = objects(store)
        assert main(["baselines", "accept", str(tmp_path), *there, *dry]) == 0
        assert "0.5 -> 0.25" in capsys.readouterr().out
        assert (objects(store) == before) is bool(dry)
    assert main(["baselines", "prune", "--mode", "2-1", *there]) == 0
    assert again(store).modes() == ["2-4"]
    (store.folder / object_of(store, "accepted/2-4.txt")).write_bytes(b"nothing")
    assert main(["baselines", "verify", *there]) == 1
    assert "of accepted/2-4.txt is damaged" in capsys.readouterr().out
    assert main(["baselines", "list", "--baselines", f"{root}/none"]) == 2
    assert "there is no baseline in" in capsys.readouterr().err
    assert main(["baselines", "unlock", *there]) == 2
    assert "--model NAME" in capsys.readouterr().err


def test_a_folder_needs_no_unlocking(tmp_path: Path, capsys: Capsys) -> None:
    recorded(tmp_path)
    assert main(["baselines", "unlock", "--baselines", str(tmp_path), "--model", "tiny"]) == 2
    assert "needs no unlocking" in capsys.readouterr().err
