"""Names and accepted errors as text: nothing is lost, and a change shows as one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgate import QgateError
from qgate.baselines import Accepted, Key, safe_name
from qgate.baselines.accepted import inspect_accepted, read_accepted
from qgate.baselines.names import quoted, unquoted

TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", " ", "%", "#", "%none", "\n", "\u2028", "a b", "é", "e\u0301", "\ud800", "層.10:出力"]
)
KEYS = st.builds(Key, TEXT, TEXT, TEXT, TEXT)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
BASE = Accepted("tiny", "2-1", "w" * 64, "i" * 64, None, "cpu")


def accepted(**values: float) -> Accepted:
    return replace(BASE, values={Key("s", site, "local", "m"): v for site, v in values.items()})


def lines(made: Accepted) -> list[str]:
    return made.to_bytes().decode().splitlines()


@given(st.dictionaries(KEYS, FLOATS, min_size=1, max_size=6), TEXT.filter(bool), TEXT.filter(bool))
def test_every_key_and_value_comes_back(values: dict[Key, float], model: str, mode: str) -> None:
    errors = replace(BASE, model=model, mode=mode, values=values)
    reread = read_accepted(errors.to_bytes(), "f")
    assert reread == errors
    assert [*map(repr, reread.values.values())] == [repr(values[key]) for key in reread.values]
    assert reread.to_bytes() == errors.to_bytes()


@given(st.dictionaries(KEYS, FLOATS, min_size=2, max_size=6), st.data())
def test_one_changed_entry_is_one_changed_line(
    values: dict[Key, float], data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(sorted(values)))
    before = lines(replace(BASE, values=values))
    after = lines(replace(BASE, values=values | {key: values[key] / 2 + 1}))
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert len(changed) == (values[key] != values[key] / 2 + 1)
    without = lines(replace(BASE, values={k: v for k, v in values.items() if k != key}))
    assert len(before) - len(without) == 1
    assert set(without) < set(before)


TOLD = Key("s", "x:input", "local", "quantizer")


@given(st.text(min_size=1, max_size=30))
def test_a_text_comes_back_where_the_metric_is_one(text: str) -> None:
    errors = replace(BASE, values={TOLD: text, Key("s", "x", "local", "m"): 0.5})
    assert read_accepted(errors.to_bytes(), "f") == errors


def test_a_text_is_no_value_of_a_number() -> None:
    line = replace(BASE, values={TOLD: "int8"}).to_bytes()
    assert b"quantizer                        =int8  " in line
    with pytest.raises(QgateError, match="'=int8' is no number"):
        read_accepted(line.replace(b"quantizer   ", b"relative_mse"), "f")


def test_the_order_does_not_depend_on_history_and_counts_layers() -> None:
    a = accepted(**{"layers.10": 1.0, "layers.2": 2.0, "layers.02": 3.0})
    b = replace(a, values=dict(reversed(a.values.items())))
    assert a.to_bytes() == b.to_bytes()
    assert [line.split()[1] for line in lines(a)[-3:]] == ["layers.02", "layers.2", "layers.10"]


def test_the_file_says_what_it_is_and_aligns_its_columns() -> None:
    text = lines(accepted(**{"layers.0.mixer.in_proj:output": 3.4e-05, "norm": 0.1}))
    assert text[0] == "# qgate accepted errors, version 3"
    assert text[6].split()[2] == "cpu"
    assert len(text[6].split()[3]) == 8
    assert [line.split()[1:3] for line in text[1:7]] == [
        ["model", "tiny"],
        ["mode", "2-1"],
        ["weights", "w" * 64],
        ["inputs", "i" * 64],
        ["calibration", "%none"],
        ["device", "cpu"],
    ]
    assert text[9].split()[4] == "3.4e-05"
    assert [len(line) for line in text[9:]] == [len(text[9])] * 2, "digests stand in one column"
    assert text[9].index("3.4e-05") == text[10].index("0.1")


GOOD = accepted(a=1.0, b=2.0).to_bytes()
BROKEN = {
    "another file": (b"hello\n", "f:1: it is no list of accepted errors"),
    "empty": (b"", "f:1: it is no list"),
    "not UTF-8": (GOOD.replace(b"tiny", b"t\xff"), "f:2: it is no UTF-8"),
    "version in words": (GOOD.replace(b"version 3", b"version x"), "f:1: it is no list"),
    "newer": (GOOD.replace(b"version 3", b"version 5"), "version 5, and this qgate reads version 3. Update"),
    "header line missing": (GOOD.replace(b"# inputs", b"# input"), "f:5: the header has no inputs here"),
    "header cut off": (GOOD[:60], "f:3: the header has no mode here"),
    "header without end": (b"\n".join(GOOD.split(b"\n")[:7]), "f:8: the header has to go on"),
    "device": (GOOD.replace(b"cpu", b"TPU"), "f:7: there is no device 'TPU'"),
    "empty hash": (GOOD.replace(b"w" * 64, b"%"), "f:4: weights is empty"),
    "bad escape": (GOOD.replace(b" a ", b" %4 "), "f:10: '%4' is not how"),
    "needless escape": (GOOD.replace(b" a ", b" %61"), "f:10: '%61' is not how"),
    "word missing": (GOOD.replace(b"local", b"     "), "f:10: 's "),
    "value": (GOOD.replace(b"2.0", b"two"), "f:11: 'two' is no number"),
    "nan": (GOOD.replace(b"2.0", b"nan"), "f:11: s b local m is nan, which is never accepted"),
    "inf": (GOOD.replace(b"2.0", b"1e999"), "never accepted"),
    "other spelling": (GOOD.replace(b"2.0", b"2.00"), "f:11: s b local m was edited, or is of another file: its digest is"),
    "twice": (GOOD + GOOD.split(b"\n")[-2] + b"\n", "f:12: s b local m is there twice, first in line 11"),
    "cut off": (GOOD[:-2], "f:11: the last line has no end"),
    "merge conflict": (GOOD + b"<<<<<<< HEAD\n", "f:12: '<<<<<<< HEAD' is not suite, site"),
    "blank line": (GOOD + b"\n", "f:12: '' is not suite"),
    "no entry": (accepted().to_bytes(), "f: it has no accepted error"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_line(name: str) -> None:
    data, words = BROKEN[name]
    with pytest.raises(QgateError) as caught:
        read_accepted(data, "f")
    assert words in str(caught.value)
    assert "Update qgate" in str(caught.value) or "Restore the file" in str(caught.value)


def test_all_broken_lines_are_found_at_once() -> None:
    data = GOOD.replace(b"1.0", b"x").replace(b"2.0", b"y")
    assert [p[:5] for p in inspect_accepted(data, "f")[1]] == ["f:10:", "f:11:"]


def test_line_ends_of_another_system_are_read() -> None:
    assert read_accepted(GOOD.replace(b"\n", b"\r\n"), "f") == accepted(a=1.0, b=2.0)


@given(TEXT)
def test_a_word_is_one_word_and_comes_back(text: str) -> None:
    word = quoted(text)
    assert unquoted(word) == text
    assert word.split() == [word]
    assert word.isprintable()
    assert not word.startswith("#")


@given(st.lists(TEXT | st.sampled_from(["hf:a/b", "hf-a/b", "A", "a"]), unique=True, min_size=2))
def test_file_names_are_safe_and_nobody_shares_one(names: list[str]) -> None:
    file_names = [safe_name(name) for name in names]
    assert len({name.lower() for name in file_names}) == len(names)
    for name in file_names:
        assert Path(name).name == name
        assert name.isascii()
        assert not name.startswith(".")
        assert len(name) <= 80
        assert not set(name) & set('<>:"/\\|?* \0')


@pytest.mark.parametrize("name", ["2-1", "mxfp8_e5m2", "tiny-mamba", "x.y"])
def test_plain_names_are_their_own_file_names(name: str) -> None:
    assert safe_name(name) == name


@pytest.mark.parametrize(
    "name", ["..", ".", "a.", "con", "nul.txt", "A", "hf:some/path", "a" * 81, "a~b"]
)
def test_other_names_get_a_hash(name: str) -> None:
    assert "~" in safe_name(name)
    assert safe_name(name) != name


def test_stale_says_which_hash() -> None:
    from tests.baselines.building import ORIGIN, OTHER_WEIGHTS

    errors = replace(
        BASE, weights=ORIGIN.weights, inputs=ORIGIN.inputs, calibration=ORIGIN.calibration
    )
    assert errors.stale(ORIGIN) == []
    weights = errors.stale(OTHER_WEIGHTS)[0]
    assert "with other weights than those of the baseline (3fa23fa23fa2…" in weights
    assert "other calibration" in errors.stale(replace(ORIGIN, calibration=None))[0]
    assert replace(errors, calibration=None).stale(replace(ORIGIN, calibration="x")) == []
