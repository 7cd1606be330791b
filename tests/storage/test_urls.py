"""URLs: what they mean, and what is refused; the store in memory needs no network."""

import threading
from pathlib import Path

import fsspec
import pytest

from qgate.errors import QgateError
from qgate.storage import locations
from qgate.storage.locations import check_writable, file_key, is_url, local_path, location_of


@pytest.fixture(autouse=True)
def _empty():
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_what_is_a_url():
    assert all(map(is_url, ["s3://b/k", "memory://a", "gs://b", "FILE:///a", "git+ssh://x"]))
    assert not any(
        map(is_url, ["a/b.pt", "/s3:/b", "x:y", "C:\\a", "s3:/b", "://x", "a.pt:s3://b"])
    )


def test_files_are_plain_paths(tmp_path):
    assert location_of(tmp_path) == tmp_path
    assert location_of(f"file://{tmp_path}") == tmp_path
    assert location_of("a/b") == Path("a/b")


def test_a_path_that_has_to_be_one_is_no_url_of_a_store(tmp_path):
    for text in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"FILE://{tmp_path}"):
        assert local_path(text, "the folder", "give one.") == tmp_path
    with pytest.raises(QgateError, match=r"^the folder 's3://b/k' is a URL, .* path: give one\.$"):
        local_path("s3://b/k", "the folder", "give one.")


def test_a_place_in_memory_reads_and_writes():
    place = location_of("memory://bucket/a/b.pt")
    assert (place.name, place.stem, place.suffix) == ("b.pt", "b", ".pt")
    check_writable(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"1234")
    assert location_of("memory://bucket/a/b.pt").read_bytes() == b"1234"
    assert location_of("MEMORY://bucket/a/b.pt").read_bytes() == b"1234"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense://b/k", "nonsense:// is not known; use s3://"),
        ("gs://b/k", "gs:// needs gcsfs; pip install it"),
    ],
)
def test_what_cannot_be_reached_is_named(url, words, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(QgateError, match=words):
        location_of(url)


def test_a_store_that_may_leave_halves_is_not_written_to():
    check_writable(Path("anywhere"))
    with pytest.raises(QgateError, match=r"'ftp://.*may leave half a file behind.*s3://"):
        check_writable(_Ftp())


class _Ftp:
    protocol = "ftp"

    def __str__(self):
        return "ftp://host/x"


def test_what_changed_has_another_identity(tmp_path):
    for place in (tmp_path / "a", location_of("memory://bucket/a")):
        assert file_key(place).endswith("missing")
        place.write_bytes(b"1")
        before = file_key(place)
        assert file_key(place) == before
        place.write_bytes(b"12")
        assert file_key(place) != before


def test_a_store_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locations, "_SILENCE_S", 0.0)
    said = threading.Event()
    monkeypatch.setattr(locations, "print_line", lambda text, **_: (print(text), said.set()))
    with locations.read_errors("s3://bucket/x"):
        assert said.wait(60)
    assert capsys.readouterr().out == "'s3://bucket/x' has not answered for 0 s; still waiting\n"
