"""results.jsonl: round trips, torn and damaged files, killed runs, workers put together."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgate import __version__
from qgate.errors import QgateError
from qgate.results import Writer, new_header, read
from qgate.results.files import HEADER_KEYS, REQUIRED, line, parse, without_pictures
from tests.baselines.faults import in_child
from tests.results.making import HEADER, header, record, write


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "deep" / "results.jsonl", record("a"), record("b", 1.0))
    head, records = read(path)
    assert head["qgate"] == __version__
    assert {name: head[name] for name in HEADER} == HEADER
    assert list(records) == [record("a"), record("b", 1.0)]
    assert list(records) == [record("a"), record("b", 1.0)], "a second reading"
    assert records.torn == ""
    assert [p.name for p in path.parent.iterdir()] == ["results.jsonl"], "nothing is left beside it"


def test_the_file_is_whole_after_every_record(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Writer(path, header()) as writer:
        for count in range(3):
            assert len(list(read(path)[1])) == count
            writer.append(record())
    with pytest.raises(QgateError, match="is closed"):
        writer.append(record())


def test_a_killed_run_leaves_what_it_knew(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def killed() -> None:
        writer = Writer(path, header())
        for _ in range(2):
            writer.append(record())
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    assert list(read(path)[1]) == [record(), record()]


def test_nan_and_infinity_are_null_with_a_reason(tmp_path: Path) -> None:
    values = {"relative_mse": math.nan, "sqnr_db": math.inf, "psnr_db": -math.inf, "mse": 0.5}
    path = write(tmp_path / "r.jsonl", record(mse=math.nan, values=values))
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    [stored_record] = read(path)[1]
    assert stored_record["values"] == {
        "relative_mse": None,
        "sqnr_db": None,
        "psnr_db": None,
        "mse": 0.5,
    }
    assert {k: v for k, v in stored_record["reason"].items() if k.startswith("/values")} == {
        "/values/relative_mse": "nan",
        "/values/sqnr_db": "inf",
        "/values/psnr_db": "-inf",
    }
    assert stored_record["reason"]["/checks/0/times"] == "inf"
    assert stored_record["passed"] is False


numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
trees = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "reason"), trees, max_size=4))
def test_a_line_is_one_line_of_json_and_loses_no_finite_number(value: dict[str, Any]) -> None:
    text = line(value)
    assert text.count("\n") == 1
    parsed = parse(text.encode())
    reasons = parsed.pop("reason", {})

    def places(tree: Any, place: str = "") -> Any:
        if isinstance(tree, dict):
            return {key: places(member, f"{place}/{key}") for key, member in tree.items()}
        if isinstance(tree, list):
            return [places(element, f"{place}/{index}") for index, element in enumerate(tree)]
        if isinstance(tree, float) and not math.isfinite(tree):
            assert place in reasons
            return None
        return tree

    assert parsed == places(value)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_record_that_lacks_something_is_refused(tmp_path: Path, name: str) -> None:
    incomplete = record()
    del incomplete[name]
    with (
        Writer(tmp_path / "r.jsonl", header()) as writer,
        pytest.raises(QgateError, match=rf"lacks {name}\."),
    ):
        writer.append(incomplete)
    assert list(read(tmp_path / "r.jsonl")[1]) == []


def test_a_record_that_passed_without_a_check_is_refused(tmp_path: Path) -> None:
    with Writer(tmp_path / "r.jsonl", header()) as writer:
        with pytest.raises(QgateError, match="passed without a check"):
            writer.append(record(checks=[], passed=True))
        with pytest.raises(QgateError, match="a check of 'fc1:output' lacks metric"):
            writer.append(record(checks=[{}]))
        writer.append(record(checks=[], passed=False))


def test_any_cut_of_the_file_keeps_the_whole_records(tmp_path: Path) -> None:
    whole = write(tmp_path / "r.jsonl", record("a"), record("b")).read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "cut.jsonl"
    for cut in range(ends[0], len(whole)):
        path.write_bytes(whole[:cut])
        _, records = read(path)
        complete = sum(cut >= end - 1 for end in ends[1:])
        assert len(list(records)) == complete
        assert bool(records.torn) == (cut not in [*ends, *(end - 1 for end in ends)])
        assert not records.torn or f"cut.jsonl:{complete + 2}" in records.torn
    for cut in range(0, ends[0] - 1, 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(QgateError, match="header is not whole"):
            read(path)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b'{"a": NaN}', b"", b"{"])
def test_damage_before_the_end_is_an_error(tmp_path: Path, damage: bytes) -> None:
    lines = write(tmp_path / "r.jsonl", record("a"), record("b")).read_bytes().splitlines()
    (tmp_path / "r.jsonl").write_bytes(b"\n".join([lines[0], lines[1], damage, lines[2], b""]))
    _, records = read(tmp_path / "r.jsonl")
    with pytest.raises(QgateError, match=r"r\.jsonl:3 is damaged"):
        list(records)


PICTURES = b"""[{"kind": "x", "text": "}, \\"pictures\\": ]", "n": [1.5e-7, {}]}]"""


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (b'{"a": 1, "pictures": ' + PICTURES + b', "b": "\\u00e9"}', {"a": 1, "b": "é"}),
        (b'{"pictures": ' + PICTURES + b"}", {}),
        (b'{"a": {"pictures": 1}}', {"a": {"pictures": 1}}),
        (b'{"a": "pictures"}', {"a": "pictures"}),
        (b'{"pictures": 1, "pictures": 2, "a": 12345678901234567890123}',
         {"a": 12345678901234567890123}),
    ],
)  # fmt: skip
def test_pictures_are_left_out_of_a_line_and_nothing_else(
    text: bytes, rest: dict[str, Any]
) -> None:
    assert parse(without_pictures(text)) == rest


@pytest.mark.parametrize(
    "text",
    [b"[1]", b'"pictures"', b'{"pictures": NaN}', b'{"pictures": [}', b'{"pictures": 1', b"\xff",
     b'{"pictures": ' + 100_000 * b"[" + b"}"],
)  # fmt: skip
def test_a_line_that_is_not_whole_is_no_other_without_pictures(text: bytes) -> None:
    assert without_pictures(text) == text


@pytest.mark.parametrize("other", ["[]", "3", '{"site": "a"}'])
def test_a_line_that_is_no_record_is_an_error(tmp_path: Path, other: str) -> None:
    path = write(tmp_path / "r.jsonl")
    path.write_text(path.read_text() + other + "\n")
    _, records = read(path)
    with pytest.raises(QgateError, match=r"r\.jsonl:2"):
        list(records)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({**header(), "schema": 2}, "has schema 2; .* reads schema 1"),
        ({**header(), "schema": "1"}, "has schema '1'"),
        ({"kind": "header"}, "has schema None"),
        (record(), "first line is no header"),
        ([], "first line is no header"),
        *(
            ({k: v for k, v in header().items() if k != name}, rf"header of .* lacks {name}\.")
            for name in HEADER_KEYS
        ),
    ],
)
def test_only_this_version_is_read(tmp_path: Path, first: Any, words: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(first) + "\n")
    with pytest.raises(QgateError, match=words):
        read(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match=r"no results at .*r\.jsonl: run `pytest suites` first"):
        read(tmp_path / "r.jsonl")


def test_a_bad_header_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", record())
    before = path.read_bytes()
    with pytest.raises(QgateError, match="no header"):
        Writer(path, {})
    assert path.read_bytes() == before


def test_a_line_that_a_full_disk_cut_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with Writer(path, header()) as writer:
        writer.append(record("a"))
        whole = writer._file

        class Full:
            closed = False

            def __getattr__(self, name: str) -> Any:
                return getattr(whole, name)

            def write(self, data: bytes) -> int:
                if len(data) < 100:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return whole.write(data[: len(data) // 2]) or 0

        writer._file = Full()  # type: ignore[assignment]
        with pytest.raises(OSError, match=r"No space left on device: .*r\.jsonl"):
            writer.append(record("b"))
        writer._file = whole
        writer.append(record("c"))
    _, records = read(path)
    assert ([entry["site"] for entry in records], records.torn) == (["a", "c"], "")


def test_a_header_needs_all_it_promises() -> None:
    for name in HEADER:
        with pytest.raises(TypeError, match=name):
            new_header(**{key: value for key, value in HEADER.items() if key != name})
