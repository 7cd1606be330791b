"""JSON in parts is what the standard library reads at once, and is refused where it refuses."""

import io
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qgate.results import rows, streaming
from qgate.results.streaming import UnfitRecordError, read_streaming

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3), max_size=4)
MANY = {"many": Any, "in.many": Any}


def read(text: str, at_once: int, many: Any = None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_AT_ONCE", at_once)
        patch.setattr(rows, "_MOST_VALUES", 5)
        return read_streaming(io.StringIO(text), "k", MANY if many is None else many)


def same(found: Any) -> Any:
    """Rows as the lists that they are of."""
    return json.loads("".join(rows.as_json(found)))


RECORDS = st.fixed_dictionaries(
    {},
    optional={"kind": st.sampled_from(["k", "other"]), "many": OBJECTS, "more": PLAIN,
              "in": st.fixed_dictionaries({}, optional={"many": OBJECTS, "x": PLAIN}) | PLAIN},
)  # fmt: skip


@given(RECORDS | PLAIN, st.integers(1, 40), st.none() | st.integers(0, 3))
def test_a_record_is_what_json_reads(record: Any, at_once: int, indent: int | None) -> None:
    text = json.dumps(record, indent=indent)
    assert same(read(text, at_once)) == json.loads(text)


def _refused(name: str) -> None:
    raise ValueError(name)


@given(RECORDS, st.integers(1, 40), st.data())
@example({"kind": "k", "many": [{"a": 1}, {"b": 2}]}, 1, None)
def test_what_json_refuses_is_refused(record: Any, at_once: int, data: Any) -> None:
    """A character is lost, doubled or another one."""
    text = json.dumps(record)
    if data is None:
        changed = text.replace("}, {", "} {")
    else:
        at = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(st.sampled_from(["", text[at] * 2, *'{}[],:"e-. 1']))
        changed = text[:at] + new + text[at + 1 :]
    try:
        expected = json.loads(changed, parse_constant=_refused)
    except ValueError:
        with pytest.raises(ValueError):
            read(changed, at_once)
    else:
        if "inf" not in repr(expected):  # 1e999, which no record of qgate has
            assert same(read(changed, at_once)) == expected


@pytest.mark.parametrize("text", ["", "{", '{"kind": "k"} 1', '{"kind": "k", "many": [{}', "[1 2]"])
def test_what_is_torn_says_where(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|Extra data"):
        read(text, 3)


def test_rows_are_believed_one_by_one_and_only_of_the_kind() -> None:
    many = {"many": dict[str, int]}
    assert read('{"kind": "other", "many": [{"b": ""}]}', 4, many)["many"] == [{"b": ""}]
    with pytest.raises(UnfitRecordError, match=r"^many\[1\]\.b is '', not a whole number$"):
        read('{"kind": "k", "many": [{"a": 1}, {"b": ""}]}', 4, many)


def test_many_are_on_disk() -> None:
    text = json.dumps({"kind": "k", "in": {"many": [{"a": i} for i in range(99)]}})
    rows_read = read(text, 16)["in"]["many"]
    assert rows.is_on_disk(rows_read)
    assert [row["a"] for row in rows_read] == list(range(99))
