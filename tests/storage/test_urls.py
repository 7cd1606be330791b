"""URLs: what they mean, and what is refused; the store in memory needs no network."""

import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from qgate.cli import main
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
    location = location_of("memory://bucket/a/b.pt")
    assert (location.name, location.stem, location.suffix) == ("b.pt", "b", ".pt")
    check_writable(location)
    location.parent.mkdir(parents=True, exist_ok=True)
    location.write_bytes(b"1234")
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
    for location in (tmp_path / "a", location_of("memory://bucket/a")):
        assert file_key(location).endswith("missing")
        location.write_bytes(b"1")
        before = file_key(location)
        assert file_key(location) == before
        location.write_bytes(b"12")
        assert file_key(location) != before


class Clock:
    """A clock that requests move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.lines = 0.0, list[str]()
        monkeypatch.setattr(locations, "_stores", {})
        monkeypatch.setattr(locations, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(locations, "print_line", lambda text, **_: self.lines.append(text))

    def request(self, url: str, seconds: float, error: Exception | None = None) -> str:
        """Make a request that takes so long and ends so; return what is said of it."""
        try:
            with locations.read_errors(url):
                self.now += seconds
                if error is not None:
                    raise error
        except QgateError as refused:
            return str(refused)
        return ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


BROKEN = OSError("the server answers 500")


def test_a_store_that_fails_again_and_again_is_given_up(clock: Clock) -> None:
    messages = [clock.request(f"s3://bucket/{number}", 7.0, BROKEN) for number in range(1000)]
    assert clock.now == 63
    assert messages[8] == "'s3://bucket/8' cannot be reached: the server answers 500."
    assert messages[-1] == (
        "'s3://bucket/999' cannot be reached: requests to 's3://bucket' have failed for 60 s, and "
        "no more are sent for now."
    )
    assert clock.lines == [
        "requests to 's3://bucket' have failed for 14 s; after 60 s no more are sent"
    ]
    with (
        pytest.raises(OSError, match="no more are sent"),
        locations.write_errors(location_of("s3://bucket/x")),
    ):
        pytest.fail("a request was sent")


def test_a_store_that_was_given_up_is_asked_again_later(clock: Clock) -> None:
    for _ in range(6):
        clock.request("s3://bucket/x", 10.0, BROKEN)
    assert "no more are sent" in clock.request("s3://bucket/x", 0.0)
    clock.now += 11
    assert clock.request("s3://bucket/x", 0.0) == ""


def test_a_store_that_fails_now_and_then_is_not_given_up(clock: Clock) -> None:
    for _ in range(1000):
        assert "500" in clock.request("s3://bucket/x", 10.0, BROKEN)
        assert clock.request("s3://bucket/x", 120.0) == ""


@pytest.mark.parametrize("error", [None, FileNotFoundError(2, "gone"), PermissionError(13, "no")])
def test_answers_are_no_failures_however_long_they_take(
    clock: Clock, error: Exception | None
) -> None:
    for _ in range(100):
        assert "no more are sent" not in clock.request("s3://bucket/x", 50.0, error)


def test_other_stores_and_paths_go_on(clock: Clock) -> None:
    for _ in range(100):
        clock.request("s3://bucket/x", 10.0, BROKEN)
        assert "500" in clock.request("nowhere/x", 10.0, BROKEN)
    assert clock.request("s3://bucket2/x", 1.0) == ""
    assert "500" in clock.request("gs://bucket/x", 1.0, BROKEN)


def test_requests_that_fail_at_once_count_as_one() -> None:
    store = locations._Store("s3://bucket")
    for number in range(16):
        store.failed(number / 100, 10 + number / 100)
    assert store.lost_s(11) == pytest.approx(10.15, abs=0.1)


def test_a_command_over_a_store_that_fails_ends(
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of 300 files would take nine seconds."""
    memory = fsspec.filesystem("memory")
    for number in range(300):
        memory.pipe_file(f"/bucket/{number}.pt", b"1234")

    def failing(*_: object, **_options: object) -> None:
        clock.now += 9
        raise BROKEN

    monkeypatch.setattr(type(memory), "_open", failing)
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "memory://bucket/*.pt", "--elem-format", "e4m3"]) == 1
    assert "no more are sent" in capsys.readouterr().out
    assert clock.now <= 72


def test_a_store_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locations, "_SILENCE_S", 0.0)
    monkeypatch.setattr(locations, "_stores", {})
    printed = threading.Event()
    monkeypatch.setattr(locations, "print_line", lambda text, **_: (print(text), printed.set()))
    with locations.read_errors("s3://bucket/x"):
        assert printed.wait(60)
    assert capsys.readouterr().out == "'s3://bucket/x' has not answered for 0 s; still waiting\n"
