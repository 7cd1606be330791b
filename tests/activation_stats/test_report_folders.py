"""Reports of activations in folders and stores: the same files, the same care for what others put
there, and a refusal before the work where nothing can be written."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qgate.activation_stats import files as reports
from qgate.activation_stats.files import check_folder, read_record, write_report
from qgate.activation_stats.plots import pictures
from qgate.activation_stats.settings import ActivationSettings, with_values
from qgate.errors import QgateError
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.activation_stats.activation_records import little
from tests.shares import proof, share

pytestmark = share(6, group="stores")

bucket, memory, server = stores.bucket, stores.memory, stores.server
ALL = with_values(
    ActivationSettings(), {"dpi": 20, "output.formats": ["png", "html", "csv", "json"]}
)
TEXTS = with_values(ALL, {"output.formats": ["csv", "json"]})
Contents = Callable[[], dict[str, bytes]]
STORES = ("s3://dumps/deep/out", "memory://a/out")
in_stores = pytest.mark.parametrize("url", STORES, indirect=True)
in_folder_and_memory = pytest.mark.parametrize("url", ["folder", "memory://a/out"], indirect=True)


@pytest.fixture(params=["folder", *STORES])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty folder or store; a report that writes elsewhere on this machine fails."""
    if request.param != "folder":
        request.getfixturevalue("bucket" if request.param.startswith("s3") else "memory")
    scratch, working = tmp_path / "scratch", tmp_path / "working"
    scratch.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield str(tmp_path / "out") if request.param == "folder" else str(request.param)
    assert [path for folder in (scratch, working) for path in folder.iterdir()] == []


@pytest.fixture
def contents(url: str, request: pytest.FixtureRequest) -> Contents:
    """All files below the URL, read from the store itself and not through qgate."""
    if url.startswith("memory"):
        store = request.getfixturevalue("memory")
        return lambda: {n.removeprefix("/a/out/"): store.cat(n) for n in store.find("/a")}
    if not url.startswith("s3"):
        files = lambda: (path for path in Path(url).rglob("*") if path.is_file())  # noqa: E731
        return lambda: {p.relative_to(url).as_posix(): p.read_bytes() for p in files()}
    client = request.getfixturevalue("bucket")
    return lambda: {
        name.removeprefix("deep/out/"): client.get_object(Bucket="dumps", Key=name)["Body"].read()
        for name in stores.keys(client)
    }


def put(url: str, name: str, data: bytes = b"mine") -> None:
    target: Any = location_of(url) / name
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    else:
        target.fs.pipe_file(target.path, data)


# What is written ---------------------------------------------------------------------------------


@proof
@in_stores
def test_a_store_gets_what_a_folder_gets(url: str, contents: Contents, tmp_path: Path) -> None:
    options = with_values(ALL, {"output.formats": (*ALL.output.formats, "svg")})
    local = write_report(little(), tmp_path / "folder", options)
    steps: list[tuple[int, int]] = []
    remote = write_report(little(), f"{url}/", options, lambda done, of: steps.append((done, of)))
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    objects = contents()
    assert objects.keys() == files.keys()
    same = [name for name in files if not name.endswith(".svg")]  # which has random ids
    assert {name: objects[name] for name in same} == {name: files[name] for name in same}
    assert {Path(name).suffix for name in objects} == {".html", ".json", ".csv", ".png", ".svg"}
    assert [file.name for file in remote] == [file.name for file in local]
    assert all(file.exists() for file in remote)
    assert str(remote[0]) == f"{url}/analysis_report.html"
    assert steps[-1][0] == steps[-1][1] > 0
    record = read_record(remote[0].parent / "activations.json")
    assert record == read_record(tmp_path / "folder" / "activations.json")


def test_a_url_of_files_is_a_folder(tmp_path: Path) -> None:
    written = write_report(little(), f"file://{tmp_path}/a/b", TEXTS)
    assert written[0].parent == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b" / "activations.json").is_file()
    assert read_record(f"file://{tmp_path}/a/b/activations.json")["kind"]


def test_a_second_run_replaces_the_first_and_nothing_else(url: str, contents: Contents) -> None:
    write_report(little(), url, TEXTS)
    before = contents()
    foreign = {"mine.csv", "small-mine.png", "deeper/layers.csv"}
    for name in foreign:
        put(url, name)
    write_report(little(), url, with_values(ALL, {"output.formats": ["json"]}))
    assert contents().keys() == {"activations.json", "small-written.json"} | foreign
    assert all(contents()[name] == b"mine" for name in foreign)
    write_report(little(), url, TEXTS)
    assert {name: data for name, data in contents().items() if name not in foreign} == before


@in_folder_and_memory
def test_files_of_others_stay(url: str, contents: Contents) -> None:
    foreign = ("analysis_report.html", "layers.csv/below", "small-sqnr-input.png")
    for name in foreign:
        put(url, name)
    written = write_report(little(), url, ALL)
    assert re.fullmatch(r"small-\w{6}-analysis_report.html", written[0].name)
    assert all(contents()[name] == b"mine" for name in foreign)
    own = {name for name in contents() if re.match(r"small-\w{6}-", name)}
    assert {file.name for file in written} == {n for n in own if not n.endswith("-written.json")}


@in_folder_and_memory
def test_models_share_a_folder(url: str, contents: Contents) -> None:
    options = with_values(ALL, {"output.formats": ["html", "json"]})
    models = ("hf:models/small", "hf:models/other", "hf:elsewhere/small")
    written = [{p.name for p in write_report(little(m), url, options)} for m in models]
    assert len(set.union(*written)) == sum(map(len, written))
    assert "analysis_report.html" in written[0]
    assert "other-analysis_report.html" in written[1]
    records = [n for n in contents() if n.endswith("activations.json")]
    assert sorted(json.loads(contents()[n])["model"] for n in records) == sorted(models)
    for model, names in zip(models[1:], written[1:], strict=True):
        assert {p.name for p in write_report(little(model), url, options)} == names


@in_folder_and_memory
def test_a_damaged_list_and_names_outside_the_folder_are_ignored(
    url: str, contents: Contents
) -> None:
    listing: dict[str, Any] = {"kind": "qgate activation report 1", "model": "hf:models/small"}
    listing["files"] = ["../up.csv", "deeper/x.csv", "/a/up.csv", 3]
    put(url, "small-written.json", json.dumps(listing).encode())
    put(url, "x-written.json", b"\xff\xfe{")
    put(url, "y-written.json", b"[" * 100_000)
    put(url, "deeper/x.csv")
    write_report(little(), url, TEXTS)
    assert contents()["deeper/x.csv"] == b"mine"
    assert contents()["x-written.json"] == b"\xff\xfe{"


@in_folder_and_memory
def test_a_killed_run_leaves_nothing_for_the_next(
    url: str, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reports, "page", kill)
        with pytest.raises(KeyboardInterrupt):
            write_report(little(), url, ALL)
    assert "statistics.csv" in contents()
    assert any(name.endswith(".png") for name in contents())
    written = {file.name for file in write_report(little(), url, TEXTS)} | {"small-written.json"}
    assert contents().keys() == written
    assert set(json.loads(contents()["small-written.json"])["files"]) == written


@in_folder_and_memory
@pytest.mark.parametrize(
    ("step", "failures", "drawn"),
    [("draw_losses", 3, ["small-head_input-input.png"]), ("save", 2, [])],
)
def test_a_picture_that_fails_leaves_the_other_files(
    step: str, failures: int, drawn: list[str], url: str, contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*arguments: object, **_: object) -> None:
        for path in arguments:
            if isinstance(path, Path):
                path.write_bytes(b"half")
        raise ValueError("planted")

    write_report(little(), url, ALL)
    monkeypatch.setattr(pictures, step, fail)
    with pytest.raises(QgateError, match=rf"{failures} of 4 pictures .*planted.*'{url}'"):
        write_report(little(), url, ALL)
    # Neither pictures of the first run nor halves of new ones.
    assert [name for name in contents() if name.endswith(".png")] == drawn
    page = contents()["analysis_report.html"]
    assert page.count(b"could not be drawn") == failures + 1  # and its headline
    assert "layers.csv" in contents()


# What cannot be written to -----------------------------------------------------------------------


def test_a_check_leaves_nothing(url: str, contents: Contents) -> None:
    check_folder(url, ALL)
    check_folder(f"{url}/deeper/", ALL)
    assert contents() == {}


def test_a_file_is_no_folder(url: str) -> None:
    put(url, "x.csv")
    with pytest.raises(QgateError, match=rf"'{url}/x.csv' is a file; give a folder"):
        check_folder(f"{url}/x.csv", ALL)


def test_a_folder_that_a_console_made_is_one(bucket: Any) -> None:
    bucket.put_object(Bucket="dumps", Key="made/", Body=b"")
    bucket.put_object(Bucket="dumps", Key="made/layers.csv/", Body=b"")
    names = {file.name for file in write_report(little(), "s3://dumps/made", TEXTS)}
    assert "small-layers.csv" in names
    assert {"made/", "made/layers.csv/", "made/small-layers.csv"} < set(stores.keys(bucket))


def test_a_whole_bucket_is_a_folder(bucket: Any) -> None:
    names = {file.name for file in write_report(little(), "s3://dumps", TEXTS)}
    assert set(stores.keys(bucket)) == names | {"small-written.json"}


@proof
@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("s3://nobucket/out", "'s3://nobucket/out' is not there: The specified bucket does not"),
        ("s3://", "'s3://' names no bucket"),
        ("https://host/out", "'https://host/out': https:// may leave half a file behind"),
        ("sss://bucket/out", "'sss://bucket/out': sss:// is not known; use s3://"),
        ("gs://bucket/out", "'gs://bucket/out': gs:// needs gcsfs; pip install it"),
    ],
)
def test_a_url_that_cannot_be_written_to_is_refused(
    location: str, words: str, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(QgateError, match=words):
        check_folder(location, ALL)
    assert stores.keys(bucket) == []


@in_folder_and_memory
@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a\nb"])
def test_a_report_name_that_is_no_file_name_is_refused(
    name: str, url: str, contents: Contents
) -> None:
    with pytest.raises(QgateError, match="report_name"):
        check_folder(url, with_values(ALL, {"output.report_name": name}))
    assert contents() == {}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ls", "'memory://a/out' cannot be reached: Access Denied"),
        ("_open", "nothing can be written to 'memory://a/out': Access Denied. Give another folder"),
        ("rm_file", r"nothing can be removed from 'memory://a/out': Access Denied.*\.probe-\d+ is"),
    ],
)
def test_missing_rights_in_a_store_are_reported_beforehand(
    method: str, words: str, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), method, refuse)
        with pytest.raises(QgateError, match=words):
            check_folder("memory://a/out", ALL)
    assert len(memory.find("/")) == (method == "rm_file")


def test_missing_rights_in_a_folder_are_reported_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    # A user who may write anywhere is refused by os.access too.
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, how: path != closed and real(path, how))
    for folder in (closed, closed / "a" / "b"):
        with pytest.raises(QgateError, match=r"Permission denied.*save_dir"):
            check_folder(folder, ALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(QgateError, match="is a file"):
        check_folder(tmp_path / "file" / "below", ALL)
    check_folder(tmp_path / "new" / "folder", ALL)
