"""What was finished is not done again, whatever the end of the run was."""

import pytest

from qgate.engine.journal import Journal


def test_a_run_takes_over_what_an_unfinished_one_recorded(tmp_path):
    with Journal(tmp_path, {"levels": 21}) as first:
        assert "a" not in first
        first.record("a", [1, None])
        first.record("b", {"x": 2})
    with Journal(tmp_path, {"levels": 21}) as second:
        assert ("a" in second, "b" in second, "c" in second, len(second)) == (True, True, False, 2)
        assert second.result("a") == [1, None]
        second.record("c", 3)
    with Journal(tmp_path, {"levels": 21}) as third:
        assert third.result("c") == 3
        third.finish()
    assert list(tmp_path.iterdir()) == []


def test_another_request_starts_anew(tmp_path):
    with Journal(tmp_path, {"levels": 21}) as first:
        first.record("a", 1)
    with Journal(tmp_path, {"levels": 11}) as other:
        assert "a" not in other
    with Journal(tmp_path, {"levels": 21}) as second:
        assert "a" in second


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_end_costs_the_last_item_alone(tmp_path, cut):
    with Journal(tmp_path, "r") as first:
        for key in "abc":
            first.record(key, key * 3)
        path = first.path
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with Journal(tmp_path, "r") as second:
        finished = [key for key in "abc" if key in second]
        assert finished == list("abc"[: len(finished)])
        assert len(finished) >= 3 - 1 - cut // len('{"key":"a","result":"aaa"}\n')
        second.record("d", 4)
    with Journal(tmp_path, "r") as third:
        assert [key for key in "abcd" if key in third] == [*finished, "d"]


def test_a_file_that_is_no_journal_is_started_anew(tmp_path):
    with Journal(tmp_path, "r") as first:
        first.record("a", 1)
        path = first.path
    path.write_bytes(b"\xff\xfe not this\n")
    with Journal(tmp_path, "r") as second:
        assert len(second) == 0
        second.record("b", 2)
    with Journal(tmp_path, "r") as third:
        assert third.result("b") == 2
