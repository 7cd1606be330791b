"""Rows that are partly on disk are what a list of dictionaries is, and take the memory of one."""

import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tracemalloc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgate.errors import QgateError
from qgate.results.rows import StoredRows, as_json, is_on_disk
from tests.baselines.faults import in_child
from tests.shares import proof

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=5), PLAIN, max_size=5), max_size=8)


def plain(value: Any) -> Any:
    """Lazy fields of fields as what they stand for."""
    return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


@proof
@given(RECORDS, st.integers(0, 30), st.randoms(use_true_random=False))
def test_they_are_what_a_list_is(records: list[dict[str, Any]], held: int, random: Any) -> None:
    rows = StoredRows(records, held=held)
    assert len(rows) == len(records)
    assert [plain(row) for row in rows] == records
    places = list(range(-len(records), len(records)))
    random.shuffle(places)
    for index in places:
        row, record = rows[index], records[index]
        names = list(record)
        random.shuffle(names)
        assert plain({name: row[name] for name in names}) == record
        assert len(row) == len(record)
        assert row.get("no such field", 3) == record.get("no such field", 3)
        assert all(name in row for name in names)
    assert [plain(row) for row in rows[1:-1]] == records[1:-1]
    order = random.sample(range(len(records)), len(records))
    assert [plain(row) for row in rows.ordered(order)] == [records[position] for position in order]


def test_few_are_a_plain_list_and_many_are_not() -> None:
    few = StoredRows([{"a": 1}, {"b": [2]}])
    assert few.plain() == [{"a": 1}, {"b": [2]}]
    assert type(few.plain()) is type(few.ordered([1])) is list
    many = StoredRows([{"a": [i]} for i in range(9)], held=12)
    assert [type(row) is dict for row in many] == [True] * 4 + [False] * 5
    assert is_on_disk({"of": {"it": many.plain()}})
    assert is_on_disk(many.ordered([3, 1]))
    assert not is_on_disk({"of": few.plain()})


@pytest.mark.parametrize("place", [9, -10])
def test_what_is_not_there_is_an_index_error(place: int) -> None:
    with pytest.raises(IndexError):
        StoredRows([{"a": i} for i in range(9)], held=4)[place]


def test_a_field_that_is_not_there_is_a_key_error() -> None:
    (row,) = StoredRows([{"a": [1], "b": 2}], held=0)
    with pytest.raises(KeyError, match="'c'"):
        row["c"]


def test_their_text_is_that_of_the_lists() -> None:
    records = [{"a": i, "é\n": [i / 3, None], "c": {"d": "\u2028", "e": -1e-320}} for i in range(9)]
    rows = StoredRows(records, held=20)
    whole = {"first": [1], "rows": rows.plain(), "more": {"x": rows.ordered(range(9)), "y": 1}}
    plain = {"first": [1], "rows": records, "more": {"x": records, "y": 1}}
    assert json.loads("".join(as_json(whole))) == plain
    assert "".join(as_json(plain)) == json.dumps(plain)
    with pytest.raises(ValueError, match="not JSON compliant"):
        "".join(as_json({"rows": StoredRows([{"a": float("nan")}], held=0)}))


def rows_of(folder: Path, count: int = 50) -> StoredRows[dict[str, Any]]:
    """On disk in a folder of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        return StoredRows([{"a": i, "b": [i] * 3} for i in range(count)], held=10)


def _sum(rows: StoredRows[dict[str, Any]]) -> int:
    return sum(row["a"] + sum(row["b"]) for row in rows)


@proof
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_them_and_take_nothing_away(tmp_path: Path, method: str) -> None:
    rows = rows_of(tmp_path)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(_sum, [rows, rows]) == [4900, 4900]
    assert _sum(rows) == 4900
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    del rows
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_where_the_file_is_not_there_is_said(tmp_path: Path) -> None:
    sent = pickle.dumps(rows_of(tmp_path))
    gc.collect()
    with pytest.raises(QgateError, match="are not there; they can be read while the process"):
        pickle.loads(sent)


@proof
def test_passing_over_a_hundred_times_as_many_takes_no_more_memory() -> None:
    def highest(count: int) -> int:
        rows = StoredRows(({"a": i, "b": [i / 7] * 64} for i in range(count)), held=0)
        tracemalloc.start()
        assert (
            sum(row["a"] + len(row["b"]) for row in rows) == count * (count - 1) // 2 + 64 * count
        )
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = highest(100), highest(10_000)
    assert many < 1.2 * few + 10_000


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_a_full_disk_is_said_and_nothing_stays(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        patch.setenv("TMPDIR", str(tmp_path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(
                QgateError, match="do not fit in memory cannot be written to"
            ) as error:
                list(StoredRows(({"a": [i] * 100} for i in range(1000)), held=0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{tmp_path}: File too large; make room there, or set TMPDIR" in str(error.value)
    del error
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "no"))
        with pytest.raises(QgateError, match="No such file or directory; make room there, or set"):
            StoredRows([{"a": 1}], held=0)


def test_what_is_added_after_reading_takes_no_place_of_others() -> None:
    rows = StoredRows([{"a": [i]} for i in range(9)], held=0)
    assert rows[1]["a"] == [1]
    rows.append({"a": [9]})
    assert [row["a"] for row in rows] == [[i] for i in range(10)]


def test_threads_read_at_once() -> None:
    rows = StoredRows([{"a": i, "b": [i] * 50} for i in range(2000)], held=0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(_sum, [rows] * 8)) == [sum(range(2000)) * 51] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_forked_process_reads_beside_its_parent(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 2000)
    child = os.fork()
    if not child:
        os._exit(_sum(rows) != sum(range(2000)) * 4)
    assert all(_sum(rows) == sum(range(2000)) * 4 for _ in range(3))
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_has_left_goes_with_the_next(tmp_path: Path) -> None:
    mine = rows_of(tmp_path)
    (scratch,) = tmp_path.iterdir()

    def killed() -> None:
        rows = rows_of(tmp_path)
        assert len(rows) == 50
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    more = rows_of(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert scratch.exists()
    assert _sum(mine) == _sum(more) == 4900
