"""Reports of activations in a store: what a folder gets, the same care for what others put there,
and a no before the work where nothing can be put."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qgate.activation_stats import files as reports
from qgate.activation_stats.files import check_folder, read_record, write_report
from qgate.activation_stats.reading import Look
from qgate.activation_stats.record import ActivationsRecord
from qgate.errors import QgateError
from qgate.storage.places import place_of
from tests import bucket as stores
from tests.report.activation_records import single

bucket, memory, server = stores.bucket, stores.memory, stores.server
ALL = Look(dpi=20, formats=("png", "html", "csv", "json"))
TEXTS = replace(ALL, formats=("csv", "json"))
Kept = Callable[[], dict[str, bytes]]
in_memory = pytest.mark.parametrize("url", ["memory://a/out"], indirect=True)


def little(model: str = "hf:models/small") -> ActivationsRecord:
    """With four pictures, one of which has nothing to show."""
    record = single()
    record["model"] = model
    record["panels"] = {"magnitude_input": {"head": ["head"]}}
    record["layers"], record["sensitivity"] = record["layers"][:1], []
    del record["layers"][0]["smoothing"], record["layers"][0]["outliers"]
    return record


@pytest.fixture(params=["s3://dumps/deep/out", "memory://a/out"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty place in a store; whoever writes to this machine instead is found out."""
    request.getfixturevalue("bucket" if request.param.startswith("s3") else "memory")
    scratch, here = tmp_path / "scratch", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield str(request.param)
    assert [path for folder in (scratch, here) for path in folder.iterdir()] == []


@pytest.fixture
def kept(url: str, request: pytest.FixtureRequest) -> Kept:
    """All objects below the place, asked of the store itself and not through qgate."""
    if url.startswith("memory"):
        store = request.getfixturevalue("memory")
        return lambda: {n.removeprefix("/a/out/"): store.cat(n) for n in store.find("/a")}
    client = request.getfixturevalue("bucket")
    return lambda: {
        name.removeprefix("deep/out/"): client.get_object(Bucket="dumps", Key=name)["Body"].read()
        for name in stores.keys(client)
    }


def put(url: str, name: str, data: bytes = b"mine") -> None:
    place: Any = place_of(url) / name
    place.fs.pipe_file(place.path, data)


# What is written ---------------------------------------------------------------------------------


def test_a_store_gets_what_a_folder_gets(url: str, kept: Kept, tmp_path: Path) -> None:
    look = replace(ALL, formats=(*ALL.formats, "svg"))
    here = write_report(little(), tmp_path / "folder", look)
    told: list[tuple[int, int]] = []
    there = write_report(little(), f"{url}/", look, lambda done, of: told.append((done, of)))
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    found = kept()
    assert found.keys() == files.keys()
    same = [name for name in files if not name.endswith(".svg")]  # which has ids of chance
    assert {name: found[name] for name in same} == {name: files[name] for name in same}
    assert {Path(name).suffix for name in found} == {".html", ".json", ".csv", ".png", ".svg"}
    assert [place.name for place in there] == [place.name for place in here]
    assert all(place.exists() for place in there)
    assert str(there[0]) == f"{url}/analysis_report.html"
    assert told[-1][0] == told[-1][1] > 0
    assert read_record(there[0].parent / "activations.json") == read_record(
        tmp_path / "folder" / "activations.json"
    )


def test_a_url_of_files_is_a_folder(tmp_path: Path) -> None:
    written = write_report(little(), f"file://{tmp_path}/a/b", TEXTS)
    assert written[0].parent == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b" / "activations.json").is_file()
    assert read_record(f"file://{tmp_path}/a/b/activations.json")["kind"]


def test_a_second_run_replaces_the_first_and_nothing_else(url: str, kept: Kept) -> None:
    write_report(little(), url, TEXTS)
    before = kept()
    for name in ("mine.csv", "small-mine.png", "deeper/layers.csv"):
        put(url, name)
    write_report(little(), url, replace(TEXTS, formats=("json",)))
    mine = {"mine.csv", "small-mine.png", "deeper/layers.csv"}
    assert kept().keys() == {"activations.json", "small-written.json"} | mine
    assert all(kept()[name] == b"mine" for name in mine)
    write_report(little(), url, TEXTS)
    assert {name: data for name, data in kept().items() if name not in mine} == before


@in_memory
def test_what_others_put_there_stays(url: str, kept: Kept) -> None:
    for name in ("analysis_report.html", "layers.csv/below", "small-sqnr-input.png"):
        put(url, name)
    written = write_report(little(), url, ALL)
    assert re.fullmatch(r"small-\w{6}-analysis_report.html", written[0].name)
    for name in ("analysis_report.html", "layers.csv/below", "small-sqnr-input.png"):
        assert kept()[name] == b"mine"
    assert {place.name for place in written} == {n for n in kept() if re.match(r"small-\w{6}-", n)} - {
        n for n in kept() if n.endswith("-written.json")
    }  # fmt: skip


@in_memory
def test_two_models_share_a_place(url: str, kept: Kept) -> None:
    models = ("hf:models/small", "hf:models/other", "hf:elsewhere/small")
    told = [{p.name for p in write_report(little(each), url, TEXTS)} for each in models]
    assert len(set.union(*told)) == sum(map(len, told))
    records = [json.loads(kept()[n])["model"] for n in kept() if n.endswith("activations.json")]
    assert sorted(records) == sorted(models)
    assert {p.name for p in write_report(little(models[2]), url, TEXTS)} == told[2]


@in_memory
def test_a_list_that_is_damaged_or_leads_elsewhere_is_not_believed(url: str, kept: Kept) -> None:
    told = {"kind": "qgate activation report 1", "model": "hf:models/small"}
    told |= {"files": ["../up.csv", "deeper/x.csv", "/a/up.csv", 3]}  # type: ignore[dict-item]
    put(url, "small-written.json", json.dumps(told).encode())
    put(url, "x-written.json", b"\xff\xfe{")
    put(url, "y-written.json", b"[" * 100_000)
    put(url, "deeper/x.csv")
    write_report(little(), url, TEXTS)
    assert kept()["deeper/x.csv"] == b"mine"
    assert kept()["x-written.json"] == b"\xff\xfe{"


@in_memory
def test_a_run_that_was_killed_leaves_nothing_for_the_next(
    url: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reports, "page", kill)
        with pytest.raises(KeyboardInterrupt):
            write_report(little(), url, ALL)
    assert any(name.endswith(".png") for name in kept())
    written = write_report(little(), url, TEXTS)
    assert kept().keys() == {place.name for place in written} | {"small-written.json"}


@in_memory
def test_a_picture_that_fails_takes_nothing_with_it(
    url: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgate.activation_stats.plots import pictures

    def half(figure: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise ValueError(f"planted {figure is not None}")

    write_report(little(), url, ALL)
    monkeypatch.setattr(pictures, "save", half)
    with pytest.raises(QgateError, match=rf"2 of 4 pictures .* planted True.*'{url}'"):
        write_report(little(), url, ALL)
    assert not [name for name in kept() if name.endswith(".png")], "old ones, or halves of new ones"
    assert b"could not be drawn" in kept()["analysis_report.html"]
    assert "layers.csv" in kept()


# What cannot be written to -----------------------------------------------------------------------


def test_a_check_leaves_nothing(url: str, kept: Kept) -> None:
    check_folder(url, ALL)
    check_folder(f"{url}/deeper/", ALL)
    assert kept() == {}


@pytest.mark.usefixtures("kept")
def test_an_object_is_no_folder(url: str) -> None:
    put(url, "x.csv")
    with pytest.raises(QgateError, match=rf"'{url}/x.csv' is a file; give a folder"):
        check_folder(f"{url}/x.csv", ALL)


def test_a_folder_that_a_console_made_is_one(bucket: Any) -> None:
    bucket.put_object(Bucket="dumps", Key="made/", Body=b"")
    bucket.put_object(Bucket="dumps", Key="made/layers.csv/", Body=b"")
    names = {place.name for place in write_report(little(), "s3://dumps/made", TEXTS)}
    assert "small-layers.csv" in names
    assert {"made/", "made/layers.csv/", "made/small-layers.csv"} < set(stores.keys(bucket))


def test_a_whole_bucket_is_a_folder(bucket: Any) -> None:
    names = {place.name for place in write_report(little(), "s3://dumps", TEXTS)}
    assert set(stores.keys(bucket)) == names | {"small-written.json"}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://nobucket/out", "'s3://nobucket/out' is not there: The specified bucket does not"),
        ("s3://", "'s3://' names no bucket"),
        ("https://host/out", "'https://host/out': https:// may leave half a file behind"),
        ("sss://bucket/out", "'sss://bucket/out': sss:// is not known; use s3://"),
        ("gs://bucket/out", "'gs://bucket/out': gs:// needs gcsfs; pip install it"),
    ],
)
def test_what_cannot_be_written_to_is_told(
    place: str, words: str, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(QgateError, match=words):
        check_folder(place, ALL)
    assert stores.keys(bucket) == []


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden"])
def test_a_report_name_that_is_no_name_is_refused(name: str, memory: Any) -> None:
    with pytest.raises(QgateError, match="report_name"):
        check_folder("memory://a", replace(ALL, report_name=name))
    assert memory.find("/") == []


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ls", "'memory://a/out' cannot be reached: Access Denied"),
        ("_open", "nothing can be written to 'memory://a/out': Access Denied. Give another folder"),
        ("rm_file", r"nothing can be removed from 'memory://a/out': Access Denied.*\.probe-\d+ is"),
    ],
)
def test_rights_that_are_missing_are_told_beforehand(
    method: str, words: str, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), method, refuse)
        with pytest.raises(QgateError, match=words):
            check_folder("memory://a/out", ALL)
    left = memory.find("/")
    assert len(left) == (method == "rm_file")
