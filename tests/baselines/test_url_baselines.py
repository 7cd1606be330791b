"""Baselines in a store of objects: the promises of a folder, or a refusal that says why."""

from __future__ import annotations

import http.server
import itertools
import json
import multiprocessing
import os
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
    Update,
    prune,
    stored_models,
    unused,
    verify,
    write_candidate,
)
from qgate.baselines.places import check_root, folders
from qgate.cli import main
from qgate.errors import QgateError
from qgate.storage.object_transactions import _kept_of
from qgate.storage.places import place_of
from qgate.storage.transactions import JOURNAL, LOCK
from tests import bucket as stores
from tests.baselines.building import (
    ORIGIN,
    OTHER_WEIGHTS,
    accepting,
    contents,
    key,
    recorded,
    recording,
    state,
    tensors,
)

if TYPE_CHECKING:
    from qgate.storage.places import Place

bucket, memory, server = stores.bucket, stores.memory, stores.server
BUCKET, keys, log_in = stores.BUCKET, stores.keys, stores.log_in

Capsys = pytest.CaptureFixture[str]
MOST_STEPS = 120
BUCKET_ROOT = f"s3://{BUCKET}/base"
MEMORY_ROOT = "memory://bucket/base"


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Place:
    """An empty place of either store."""
    request.getfixturevalue("memory" if request.param == "memory" else "bucket")
    return place_of(MEMORY_ROOT if request.param == "memory" else BUCKET_ROOT)


def again(store: Store) -> Store:
    """What another process has of it: nothing in memory."""
    _kept_of.cache_clear()
    return Store(store.folder.parent, store.model)


def objects(store: Store) -> dict[str, bytes]:
    """All that is in the store, machinery included."""
    fs, start = store.files._fs, f"{store.files._root}/"  # type: ignore[attr-defined]
    return {name.removeprefix(start): bytes(fs.cat_file(name)) for name in fs.find(start)}


def large_update() -> Update:
    """Files that change, one that comes, two that go."""
    update = accepting({key(): 3.0}, update=recording(OTHER_WEIGHTS, seed=1))
    update.set_accepted("new", key(), 4.0)
    update.drop("2-4", key())
    return update


# The same as in a folder -----------------------------------------------------------------------


def test_it_is_what_a_folder_has(root: Place, tmp_path: Path) -> None:
    there, here = recorded(root), recorded(tmp_path)
    assert objects(there) == contents(here.folder)
    assert state(again(there)) == state(here)
    assert there.exists()
    assert verify(again(there)) == []
    for store in (there, here):
        assert store.commit(large_update()) != []
    assert objects(there) == contents(here.folder)
    assert state(there) == state(again(there)) == state(here)
    assert stored_models(root) == ["tiny"]


def test_a_copied_folder_is_a_baseline_and_back(bucket: Any, tmp_path: Path) -> None:
    here = recorded(tmp_path)
    for name, data in contents(here.folder).items():
        bucket.put_object(Bucket=BUCKET, Key=f"base/tiny/{name}", Body=data)
    there = Store(place_of(BUCKET_ROOT), "tiny")
    assert verify(there) == []
    there.commit(accepting({key(): 3.0}))
    back = tmp_path / "back" / "tiny"
    for name in keys(bucket, "base/tiny/"):
        path = back / name.removeprefix("base/tiny/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.get_object(Bucket=BUCKET, Key=name)["Body"].read())
    assert state(Store(tmp_path / "back", "tiny")) == state(there)


def test_verbs_of_the_library(root: Place) -> None:
    store = recorded(root)
    measured = {"2-1": {("test_layer_outputs", "layers.0:output", "local")}}
    assert len(unused(store, measured)["2-1"]) == 11
    assert [change.file for change in prune(store, ["2-1"])] != []
    assert again(store).modes() == ["2-1"]
    assert store.commit(accepting({key(): 1e-4})) == []


def test_a_changed_object_is_seen_by_a_reader_that_was_there_before(root: Place) -> None:
    store = recorded(root)
    assert store.accepted("2-4").values == {key(): 0.5}  # type: ignore[union-attr]
    again(store).commit(accepting({key(): 0.75}, "2-4"))
    assert store.accepted("2-4").values == {key(): 0.75}  # type: ignore[union-attr]


def test_damage_is_an_error_and_no_tensor_is_believed(root: Place) -> None:
    store = recorded(root)
    name = "reference-plain.safetensors"
    data = bytearray(objects(store)[name])
    data[-1] ^= 1
    (store.folder / name).write_bytes(bytes(data))
    with pytest.raises(QgateError, match=r"plain.safetensors: the tensor of .* is not the one"):
        store.reference("plain")
    assert len(verify(store)) == 1


def test_what_is_read_again_is_asked_for_once(root: Place) -> None:
    store = again(recorded(root))
    asked: list[str] = []

    class Counting(Dying):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self._fs, name)
            return self._read if name == "cat_file" else found

        def _read(self, path: str, **ranged: int) -> Any:
            asked.append(path.rpartition("/")[2])
            return self._fs.cat_file(path, **ranged)

    store.files._fs = Counting(store.files._fs, 1)  # type: ignore[attr-defined]
    for _ in range(3):
        assert store.accepted("2-1") is not None
        assert store.accepted("2-4") is not None
        assert store.origin() is not None
    assert sorted(asked) == ["2-1.txt", "2-4.txt", "manifest.json"]


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
    made.files._fs = made.files._lock._fs = Dying(made.files._fs, step)  # type: ignore[attr-defined]
    return made


def is_killed(work: Callable[[], object]) -> bool:
    try:
        work()
    except Killed:
        return True
    return False


def test_killed_at_every_step(root: Place) -> None:
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
        again(store).files.unlock()
        origin = store.origin()
        assert origin is not None
        again(store).commit(accepting({key(): 0.75}, "later", origin))
        assert not [name for name in objects(store) if name.rpartition("/")[2].startswith(".")]
        found = state(again(store))
        assert found.pop("later").values == {key(): 0.75}
        assert found == (new if seen[-1] else old), step
        assert not [problem for problem in verify(store) if "other weights" not in problem]
    assert seen == sorted(seen)
    assert step > 15
    assert found == new


@pytest.mark.usefixtures("memory")
def test_killed_again_while_finishing_what_was_killed() -> None:
    root = place_of(MEMORY_ROOT)

    def cut_off(name: str) -> Store:
        store = recorded(root / name)
        for step in itertools.count(1):
            is_killed(partial(dying(store, step).commit, large_update()))
            store.files.unlock()
            if JOURNAL in objects(store):
                return store
        raise AssertionError

    new = state(cut_off("new"))
    for step in range(1, MOST_STEPS):
        store = cut_off(str(step))
        update = accepting({key(): 0.75}, "later", OTHER_WEIGHTS)
        died = is_killed(partial(dying(store, step).commit, update))
        found = state(again(store))
        found.pop("later", None)
        assert found == new, step
        if not died:
            break
    assert step > 10


def test_the_rest_of_an_update_is_told_and_removed_by_prune(root: Place, capsys: Capsys) -> None:
    store = recorded(root)
    is_killed(lambda: dying(store, 5).commit(large_update()))
    before = state(store)
    left = [name for name in objects(store) if name.endswith(".new")]
    assert len(left) == 2
    assert [name in " ".join(verify(store)) for name in left] == [True, True]
    baselines = ["--baselines", str(root)]
    assert main(["baselines", "unlock", "--model", "tiny", *baselines]) == 0
    assert f"the lock of process {os.getpid()} on" in capsys.readouterr().out
    assert main(["baselines", "prune", "--mode", "2-4", "--dry-run", *baselines]) == 0
    assert [name for name in objects(store) if name.endswith(".new")] == left
    assert main(["baselines", "prune", "--mode", "2-4", *baselines]) == 0
    assert capsys.readouterr().out.count("was cut off removed") == 2
    assert not [name for name in objects(store) if name.endswith((".new", LOCK))]
    before.pop("2-4")
    assert state(store) == before


def test_a_put_that_fails_leaves_what_was_there(root: Place) -> None:
    store = recorded(root)
    before = objects(store)
    for step in range(1, 6):
        broken = again(store)
        fs = broken.files._fs  # type: ignore[attr-defined]
        broken.files._fs = Failing(fs, step)  # type: ignore[attr-defined]
        with pytest.raises(QgateError, match=r"could not be written: Slow down.*They are as they"):
            broken.commit(large_update())
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


def test_an_answer_that_is_lost_is_no_failure(root: Place) -> None:
    store = recorded(root)
    expected = recorded(root / "expected")
    expected.commit(large_update())

    class Lossy(Failing):
        def _step(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
            call(*given, **more)
            if given[0].endswith(JOURNAL):
                raise OSError(5, "Connection reset")

    broken = again(store)
    broken.files._fs = Lossy(broken.files._fs, 1)  # type: ignore[attr-defined]
    assert broken.commit(large_update()) != []
    assert objects(store) == objects(expected)


# Two at once -----------------------------------------------------------------------------------


def test_a_lock_is_told_with_its_holder_and_how_it_is_removed(root: Place, capsys: Capsys) -> None:
    store = recorded(root)
    with again(store).files.changing(1.0), pytest.raises(QgateError) as caught:
        store.commit(accepting({key(): 3.0}), timeout_s=0.1)
    text = str(caught.value)
    assert f"is being updated by process {os.getpid()} on " in text.replace("are being", "is being")
    assert " s ago), and not free within 0.1 s." in text
    assert f"`qgate baselines unlock --baselines {root} --model tiny`" in text
    store.commit(accepting({key(): 3.0}), timeout_s=0.1)
    assert main(["baselines", "unlock", "--baselines", str(root), "--model", "tiny"]) == 0
    assert "tiny: nobody has a lock" in capsys.readouterr().out


def test_an_old_lock_is_not_waited_for(root: Place) -> None:
    store = recorded(root)
    (store.folder / LOCK).write_bytes(b"process 7 on there, 2020-02-03 04:05:06, abcd")
    with pytest.raises(QgateError, match=r"process 7 on there, 2020-02-03 04:05:06 UTC \(.* days"):
        store.commit(accepting({key(): 3.0}), timeout_s=60)


def test_a_writer_whose_lock_was_removed_writes_nothing(root: Place) -> None:
    store = recorded(root)
    before = objects(store)
    with store.files.changing(1.0):
        again(store).files.unlock()
        with pytest.raises(QgateError, match="the lock of this process was removed"):
            store.files.replace({"accepted/2-4.txt": None, "accepted/2-1.txt": b"x"})
    assert objects(store) == before


def commit_many(url: str, number: int, count: int) -> None:
    for i in range(count):
        Store(place_of(url), "tiny").commit(accepting({key(f"w{number}.{i}:output"): 1.0 + i}))


@pytest.mark.usefixtures("bucket")
def test_many_writers_and_a_reader_lose_nothing_and_see_no_mixture() -> None:
    store = recorded(place_of(BUCKET_ROOT))
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=commit_many, args=(BUCKET_ROOT, n, 4)) for n in range(2)]
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


def test_a_reader_between_two_updates_sees_one_of_them(root: Place) -> None:
    """The reference changes between the listing and the reading of it."""
    store, other = recorded(root), Store(root, "tiny")
    update = recording(OTHER_WEIGHTS, seed=1)
    fs = other.files._fs  # type: ignore[attr-defined]

    class Slow(Failing):
        def __getattr__(self, name: str) -> Any:
            if name == "cat_file" and self._left:
                self._left = 0
                store.commit(update)
            return getattr(self._fs, name)

    other.files._fs = Slow(fs, 1)  # type: ignore[attr-defined]
    found = other.reference("plain")
    assert all((found[site].values == each.values).all() for site, each in tensors(1).items())


# What cannot be reached, and what is refused ---------------------------------------------------


def attempts(place: Place) -> Iterator[Callable[[], object]]:
    yield lambda: check_root(place, False)
    yield lambda: stored_models(place)
    yield lambda: Store(place, "tiny").origin()
    yield lambda: Store(place, "tiny").commit(recording())
    yield lambda: verify_or_raise(Store(place, "tiny"))


def verify_or_raise(store: Store) -> None:
    raise QgateError(verify(store)[0])


@pytest.mark.usefixtures("bucket")
def test_a_bucket_that_is_not_there(capsys: Capsys) -> None:
    for attempt in attempts(place_of("s3://nobucket/base")):
        with pytest.raises(QgateError, match=r"'s3://nobucket/base.*' cannot be reached: The spec"):
            attempt()
    assert main(["baselines", "list", "--baselines", "s3://nobucket/base"]) == 2
    assert "bucket does not exist" in capsys.readouterr().err


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    log_in("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for attempt in attempts(place_of("s3://elsewhere/base")):
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
        check_root(place_of(BUCKET_ROOT), False)


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
    store = recorded(place_of(BUCKET_ROOT))
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
    store = recorded(place_of(BUCKET_ROOT))
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


def test_what_is_behind_a_web_server_is_read_and_not_written(tmp_path: Path) -> None:
    here = recorded(tmp_path)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    root = place_of(f"http://127.0.0.1:{web.server_port}")
    store = Store(root, "tiny")
    try:
        check_root(root, False)
        assert store.origin() == here.origin()
        assert store.accepted("2-1") == here.accepted("2-1")
        assert store.accepted("none") is None
        assert store.reference("plain").keys() == here.reference("plain").keys()
        for attempt in (lambda: store.commit(large_update()), lambda: check_root(root, True)):
            with pytest.raises(QgateError, match="http:// may leave half a file behind"):
                attempt()
        for attempt in (lambda: folders(root), store.modes, store.files.stats):  # type: ignore[assignment]
            with pytest.raises(QgateError, match="cannot be listed by http://"):
                attempt()
    finally:
        web.shutdown()
    assert state(here) == state(Store(tmp_path, "tiny"))


# The command -----------------------------------------------------------------------------------


def test_the_verbs(root: Place, tmp_path: Path, capsys: Capsys) -> None:
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
    (store.folder / "accepted" / "2-4.txt").write_bytes(b"nothing")
    assert main(["baselines", "verify", *there]) == 1
    assert "2-4.txt:1: it is no list" in capsys.readouterr().out
    assert main(["baselines", "list", "--baselines", f"{root}/none"]) == 2
    assert "there is no baseline in" in capsys.readouterr().err
    assert main(["baselines", "unlock", *there]) == 2
    assert "--model NAME" in capsys.readouterr().err


def test_a_folder_needs_no_unlocking(tmp_path: Path, capsys: Capsys) -> None:
    recorded(tmp_path)
    assert main(["baselines", "unlock", "--baselines", str(tmp_path), "--model", "tiny"]) == 2
    assert "needs no unlocking" in capsys.readouterr().err


def test_a_journal_names_what_it_promises(root: Place) -> None:
    store = recorded(root)
    (store.folder / JOURNAL).write_bytes(json.dumps({"version": 1}).encode())
    assert state(store) == state(recorded(root / "other"))
    assert JOURNAL in verify(store)[0]
    store.commit(accepting({key(): 3.0}))
    assert JOURNAL not in objects(store)
