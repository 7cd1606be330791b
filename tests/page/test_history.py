"""The history file: nothing is lost, whoever writes at the same time and whatever is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.page._sections import trend_section
from qgate.page.history import Point, extend_history, point_of, read_points
from qgate.results import Tally
from qgate.storage.files import lock
from tests.results.making import header, record


def point(day: int, commit: str = "abc", mse: float = 1e-4) -> Point:
    records = [record("a", mse, grades={"mse": "good"}), record("b", mode="int8")]
    head = header(commit=commit, started=f"2026-11-{day:02d}T10:00:00+00:00")
    return point_of("nightly", head, Tally(records))


def add_points(path: Path, points: Iterable[Point], **options: float) -> list[Point]:
    with extend_history(path, points, **options) as together:
        return together


def test_a_point_has_margin_error_and_failures_of_every_mode() -> None:
    first_point = point(1, mse=1.0)
    assert (first_point.gates, first_point.failed, first_point.comparisons, first_point.commit) == (
        2,
        1,
        2,
        "abc",
    )
    one, two = first_point.modes
    assert (one.model, one.mode, one.gates, one.failed, one.scope, one.error) == (
        "tiny",
        "2-1",
        1,
        1,
        "carried",
        1.0,
    )
    assert one.margin == pytest.approx(1 / 1.02e-4)
    assert (two.mode, two.failed) == ("int8", 0)
    odd = point(1, mse=float("nan")).modes[0]
    assert (odd.margin, odd.error, odd.failed) == (None, None, 1)


def test_points_are_added_once_and_come_by_time(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    assert add_points(path, [point(2)]) == [point(2)]
    assert add_points(path, [point(1), point(3)]) == [point(1), point(2), point(3)]
    before = path.read_bytes()
    assert add_points(path, [point(2)]) == [point(1), point(2), point(3)]
    assert path.read_bytes() == before
    assert [p.started[8:10] for p in read_points(path)] == ["02", "01", "03"]
    assert [file.name for file in tmp_path.iterdir()] == ["h.jsonl"], "no lock is left"
    for text in path.read_text().splitlines():
        assert json.loads(text)["schema"] == 1


def test_a_run_that_is_told_again_takes_its_own_place(tmp_path: Path) -> None:
    """The first report was made of a run that was still going on."""
    path = tmp_path / "h.jsonl"
    part = replace(point(1), gates=1, modes=point(1).modes[:1], finished=False)
    add_points(path, [part, point(2)])
    assert add_points(path, [point(1)]) == [point(1), point(2)]
    assert add_points(path, [part]) == [point(1), point(2)], "what came of it stays"
    named = replace(point(1), name="other")
    assert add_points(path, [named]) == [named, point(2)]


@pytest.mark.parametrize(
    "other",
    [
        {"python": "3.99.0"},
        {"qgate": "99.0"},
        {"torch": None},
        {"failed": 1},
        {"gates": 3},
        {"modes": point(1, mse=2e-5).modes},
        {"modes": (replace(point(1).modes[0], mode="other"),), "finished": False},
    ],
)
def test_two_runs_of_one_second_both_stay(tmp_path: Path, other: dict[str, Any]) -> None:
    points = [point(1), replace(point(1), **other)]
    path = tmp_path / "h.jsonl"
    assert add_points(path, points) == points
    assert add_points(path, points[:1]) == points
    assert add_points(path, points[1:]) == points
    assert read_points(path) == points


def test_a_point_of_an_earlier_qgate_takes_its_own_place(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    add_points(path, [point(1)])
    old = json.loads(path.read_text())
    for name in ("python", "finished", "other_failed"):
        del old[name]
    path.write_text(json.dumps(old) + "\n")
    assert add_points(path, [point(1)]) == [point(1)]


def test_a_history_is_what_it_was_if_what_is_made_of_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    add_points(path, [point(1)])
    before = path.read_bytes()

    def no_page() -> None:
        with extend_history(path, [point(2)]) as together:
            assert together == [point(1), point(2)]
            raise ValueError("no page")

    with pytest.raises(ValueError, match="no page"):
        no_page()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["h.jsonl"]


def test_a_history_that_cannot_be_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("qgate.storage.files.os.open", refused)  # root may write everywhere
    with pytest.raises(PermissionError) as caught:
        add_points(tmp_path / "h.jsonl", [point(1)])
    assert caught.value.filename == str(tmp_path / "h.jsonl")


def test_no_file_and_an_empty_one_are_a_new_history(tmp_path: Path) -> None:
    assert read_points(tmp_path / "none.jsonl") == []
    (tmp_path / "empty.jsonl").touch()
    assert add_points(tmp_path / "empty.jsonl", [point(1)]) == [point(1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", r"h\.jsonl:2 is damaged"),
        ("", r"h\.jsonl:2 is damaged"),
        ("[1]", r"h\.jsonl:2 is no point of a history"),
        ('{"schema":1,"kind":"header"}', r"h\.jsonl:2 is no point of a history"),
        ('{"schema":9,"kind":"qgate history point","qgate":"7.0"}', r"schema 9, .* knows 1: use the qgate that wrote it, 7\.0"),
        ('{"schema":1,"kind":"qgate history point"}', r"h\.jsonl:2 is damaged: name is missing"),
        ("GATES", r"h\.jsonl:2 is damaged: gates is 'many', not a whole number"),
        ("NAN", r"h\.jsonl:2 is damaged: NaN is not JSON"),
        ("MODES", r"h\.jsonl:2 is damaged"),
    ],
)  # fmt: skip
def test_damage_is_refused_and_nothing_is_lost(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "h.jsonl"
    add_points(path, [point(1)])
    good = path.read_text()
    bad = {
        "GATES": good.replace('"gates":2', '"gates":"many"').strip(),
        "NAN": good.replace('"gates":2', '"gates":NaN').strip(),
        "MODES": good.replace('"margin"', '"margins"').strip(),
    }.get(text, text)
    path.write_text(good + bad + "\n" + good)
    before = path.read_bytes()
    with pytest.raises(QgateError, match=words):
        add_points(path, [point(2)])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["h.jsonl"]


def test_a_failed_write_leaves_the_old_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.jsonl"
    add_points(path, [point(1)])
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        add_points(path, [point(2)])
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["h.jsonl"]


def _adds(path: str, start: int, count: int) -> None:
    for day in range(start, start + count):
        add_points(Path(path), [point(1, commit=str(day))])


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    started = [context.Process(target=_adds, args=(str(path), 100 * k, 8)) for k in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * 4
    assert {p.commit for p in read_points(path)} == {
        str(100 * k + n) for k in range(4) for n in range(8)
    }


def test_a_history_that_stays_locked_is_said(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with (
        lock(tmp_path / ".h.jsonl.lock", 1, "x is"),
        pytest.raises(
            QgateError, match=rf"the history '.*h\.jsonl' is being updated by process {os.getpid()}"
        ),
    ):
        add_points(path, [point(1)], timeout_s=0.05)
    assert not path.exists()


@pytest.mark.parametrize("name", ["no/h.jsonl", ""])
def test_a_history_has_to_be_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(QgateError, match=r"there is no folder|is a folder"):
        add_points(tmp_path / name, [point(1)])


def test_the_trend_shows_every_run_with_its_commit() -> None:
    points = [point(day, commit=f"{day:040x}", mse=10.0 ** -(day % 5)) for day in range(1, 9)]
    section = trend_section(points)
    assert section.anchor == "trend"
    assert section.html.count("<svg") == 3
    for shown_point in points:
        assert f"{shown_point.commit}"[:12] in section.html
    assert "2-1" in section.html
    one = trend_section(points[:1])
    assert "<svg" not in one.html
    assert "One run so far" in one.html


def test_names_stay_text_in_the_trend() -> None:
    evil = "<script>alert(1)</script>"
    points = [
        replace(
            point(day),
            name=evil,
            commit=evil,
            device=evil,
            modes=tuple(replace(m, mode=evil, model=evil) for m in point(day).modes),
        )
        for day in (1, 2)
    ]
    assert "<script" not in trend_section(points).html
