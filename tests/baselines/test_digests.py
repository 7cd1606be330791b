"""Digests of accepted lines: an edit by hand is an error, a merge of two branches is none."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qgate import QgateError
from qgate.baselines import Accepted, Key, Store, Update, verify
from qgate.baselines.accepted import inspect_accepted, read_accepted
from tests.adoption.repository import run
from tests.baselines.building import ORIGIN, accepting, contents, key, recorded

BASE = Accepted("tiny", "2-1", "w" * 64, "i" * 64, None, "cpu-avx2")
SITES = [f"layers.{i}:output" for i in range(6)]


def accepted(**fields: object) -> Accepted:
    values = {Key("s", site, "local", "m"): 0.01 * (i + 1) for i, site in enumerate(SITES)}
    return replace(BASE, values=values, **fields)  # type: ignore[arg-type]


def line_of(file: Accepted, site: str) -> bytes:
    (line,) = (line for line in file.to_bytes().split(b"\n") if f" {site} ".encode() in line)
    return line


GOOD = accepted().to_bytes()
THIRD = line_of(accepted(), SITES[2])


def other_line(**fields: object) -> bytes:
    """Put the third line of a file with another header in the place of this one's."""
    return GOOD.replace(THIRD, line_of(accepted(**fields), SITES[2]))


EDITS: dict[str, tuple[bytes, str]] = {
    "loosened a hundred times": (GOOD.replace(b"0.03 ", b"3.0  "), SITES[2]),
    "another digit": (GOOD.replace(b"0.03", b"0.04"), SITES[2]),
    "another site": (GOOD.replace(b"layers.2:output", b"layers.7:output"), "layers.7:output"),
    "another spelling": (GOOD.replace(b"0.03", b"3e-2"), SITES[2]),
    "a blank less": (GOOD.replace(THIRD, THIRD.replace(b"  ", b" ", 1)), SITES[2]),
    "the digest": (GOOD.replace(THIRD[-8:], b"01234567"), SITES[2]),
    "the digest of another line": (
        GOOD.replace(THIRD[-8:], line_of(accepted(), SITES[3])[-8:]), SITES[2]),
    "of another mode": (other_line(mode="2-4"), SITES[2]),
    "of other weights": (other_line(weights="v" * 64), SITES[2]),
    "of other inputs": (other_line(inputs="j" * 64), SITES[2]),
    "of another calibration": (other_line(calibration="c" * 64), SITES[2]),
    "of another model": (other_line(model="large"), SITES[2]),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_line_is_named(name: str) -> None:
    data, site = EDITS[name]
    with pytest.raises(QgateError) as caught:
        read_accepted(data, "baselines/tiny/accepted/2-1.txt")
    text = str(caught.value)
    assert text.startswith(
        f"baselines/tiny/accepted/2-1.txt:12: s {site} local m was edited, or is"
    )
    assert "not edited by hand" in text
    assert text.endswith("write it anew with `pytest suites --mode 2-1 --update-baselines`.")
    with pytest.raises(QgateError, match="anew with `make it`"):
        read_accepted(data, "f", refresh="make it")


@pytest.mark.parametrize("field", ["model", "mode", "weights", "inputs", "calibration"])
def test_a_file_with_the_header_of_another_one_is_one_error(field: str) -> None:
    old = f"# {field:<12} {getattr(BASE, field) or '%none'}".encode()
    _, problems = inspect_accepted(GOOD.replace(old, old[:15] + b"other"), "f")
    (text,) = problems
    assert text.startswith("f:10: s layers.0:output local m was edited")
    assert "all 6 lines: they were recorded for another header" in text


def test_an_edited_device_is_an_error_and_nothing_is_compared_under_it() -> None:
    data = GOOD.replace(b"cpu-avx2", b"cpu")
    assert inspect_accepted(data, "f")[1] == ["f:7: device cpu was edited"]
    with pytest.raises(QgateError, match="f:7: device cpu was edited"):
        read_accepted(data, "f")
    assert read_accepted(data, "f", replaced=True).values == {}


def test_a_line_without_a_digest_is_no_line() -> None:
    with pytest.raises(
        QgateError, match=r"f:12: .* is not suite, site, scope, metric, value and d"
    ):
        read_accepted(GOOD.replace(THIRD, THIRD[:-9]), "f")


@pytest.mark.parametrize("device", ["cpu-avx2", "mixed"])
def test_lines_that_git_merges_from_two_branches_are_valid(tmp_path: Path, device: str) -> None:
    base = accepted()
    ours = replace(base, values=base.values | {Key("s", SITES[0], "local", "m"): 0.5})
    new = Key("s", "layers.9:output", "local", "m")
    theirs = replace(base, values=base.values | {new: 0.7}, device=device)
    for name, file in (("base", base), ("ours", ours), ("theirs", theirs)):
        (tmp_path / name).write_bytes(file.to_bytes())
    merge = ["git", "merge-file", "-p", "ours", "base", "theirs"]
    merged = subprocess.run(merge, cwd=tmp_path, capture_output=True, check=True).stdout
    merged_errors = read_accepted(merged, "f")
    assert merged_errors == replace(base, values=ours.values | {new: 0.7}, device=device)
    assert merged_errors.to_bytes() == merged


def test_branches_that_git_merges_verify(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        run(["git", *words], tmp_path)

    git("init", "--initial-branch=main")
    store = recorded(tmp_path / "baselines")
    git("add", ".")
    git("commit", "--message=base")
    before = store.accepted("2-1").values
    changes = {"main": {key("layers.3:output"): 5e-4}, "side": {key("layers.90:output"): 0.012}}
    git("branch", "side")
    for branch, values in changes.items():
        git("checkout", branch)
        store.commit(accepting(values))
        git("commit", "--all", f"--message={branch}")
    git("merge", "main")
    assert verify(store) == []
    assert store.accepted("2-1").values == before | changes["main"] | changes["side"]


# Updates --------------------------------------------------------------------------------------


def edited_file(store: Store, old: bytes, new: bytes) -> Path:
    path = Path(str(store.folder)) / "accepted" / "2-1.txt"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def test_an_update_measures_an_edited_line_again(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = contents(store.folder)  # type: ignore[arg-type]
    edited_file(store, b"0.0004", b"0.04  ")
    with pytest.raises(QgateError, match=r"layers.3:output local relative_mse was edited"):
        store.accepted("2-1")
    assert any("layers.3:output local relative_mse was edited" in line for line in verify(store))
    changes = store.commit(accepting({key("layers.3:output"): 4e-4}))
    assert [str(change) for change in changes] == [
        "accepted/2-1.txt: test_layer_outputs layers.3:output local relative_mse: none -> 0.0004"
    ]
    assert contents(store.folder) == before  # type: ignore[arg-type]


def prune(update: Update) -> None:
    update.drop("2-1", key("layers.4:output"))


def measure(update: Update) -> None:
    accepting({key("layers.4:output"): 7e-4}, update=update)


@pytest.mark.parametrize("change", [prune, measure])
def test_an_update_that_leaves_an_edited_line_writes_nothing(
    tmp_path: Path, change: Callable[[Update], None]
) -> None:
    store = recorded(tmp_path)
    edited_file(store, b"0.0004", b"0.04  ")
    before = contents(store.folder)  # type: ignore[arg-type]
    update = Update(ORIGIN)
    change(update)
    words = (
        r"1 lines were edited or are of another file, such as that of test_layer_outputs layers.3"
    )
    with pytest.raises(QgateError, match=words):
        store.commit(update)
    assert contents(store.folder) == before  # type: ignore[arg-type]
