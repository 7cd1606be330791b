"""Accepted errors of further kinds of devices: files beside the first one of a mode."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Accepted, Key, Store, Update, verify
from qgate.baselines.accepted import accepted_file, inspect_accepted, kind_in, read_accepted
from qgate.baselines.kinds import values_for
from qgate.errors import QgateError
from tests.baselines.building import (
    ORIGIN,
    OTHER_WEIGHTS,
    accepting,
    contents,
    key,
    recorded,
    recording,
    rewrite,
)

CUDA = replace(ORIGIN, device="cuda-sm_90-deadbeef")
NPU = replace(ORIGIN, device="npu-ascend910-01234567")
FILE = "accepted/2-1@cuda.txt"
OWN = {key(): 3.0, key("layers.10:output"): 4.0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Twelve errors of the CPU, two of CUDA beside them."""
    recorded_store = recorded(tmp_path)
    recorded_store.commit(accepting(OWN, origin=CUDA))
    return recorded_store


def cuda_file(store: Store) -> Accepted:
    return store.accepted_on("2-1", "cuda")["cuda"]


def test_further_kinds_have_files_of_their_own(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = contents(tmp_path)
    changes = store.commit(accepting(OWN, origin=CUDA))
    assert {change.file for change in changes} == {FILE}
    store.commit(accepting({key(): 5.0}, origin=NPU))
    after = contents(tmp_path)
    new = [name for name in after if name not in before]
    assert new == ["tiny/accepted/2-1@cuda.txt", "tiny/accepted/2-1@npu.txt"]
    assert {name: after[name] for name in before} == before
    text = after[new[0]].decode().splitlines()
    assert text[0] == "# qgate accepted errors, version 3"
    assert [line.split()[1:3] for line in text[6:8]] == [["kind", "cuda"], ["device", CUDA.device]]
    assert len(text) == 10 + len(OWN)
    assert store.origin() == ORIGIN
    assert {kind: of.device for kind, of in store.all_accepted()["2-1"].items()} == {
        "": "cpu", "cuda": CUDA.device, "npu": NPU.device,
    }  # fmt: skip
    assert store.modes() == ["2-1", "2-4"]
    assert verify(store) == []


def test_own_values_come_before_those_of_the_first_device(store: Store) -> None:
    files = store.accepted_on("2-1", "cuda")
    values = values_for([files["cuda"], files[""]])
    assert len(values) == 12
    assert values[key()] == (3.0, CUDA.device)
    assert values[key("layers.1:output")] == (2e-4, "cpu")


def test_the_first_device_changes_its_own_file_only(store: Store, tmp_path: Path) -> None:
    before = contents(tmp_path)
    changes = store.commit(accepting({key(): 7.0}))
    after = contents(tmp_path)
    assert [change.file for change in changes] == ["accepted/2-1.txt"]
    assert [name for name in after if after[name] != before[name]] == ["tiny/accepted/2-1.txt"]


def test_other_arithmetic_of_a_kind_is_in_the_file_of_the_kind(store: Store) -> None:
    other = replace(CUDA, device="cuda-sm_80-0badcafe")
    store.commit(accepting({key(): 5.0}, origin=other))
    assert cuda_file(store).device == "cuda-mixed"
    store.commit(accepting(OWN, origin=other))
    assert cuda_file(store).device == other.device
    assert verify(store) == []


def test_other_weights_replace_the_first_file_and_its_own(store: Store) -> None:
    other = replace(OTHER_WEIGHTS, device=CUDA.device)
    store.commit(accepting({key(): 1.0}, origin=other, update=recording(other)))
    assert {kind: of.device for kind, of in store.all_accepted()["2-1"].items()} == {
        "": CUDA.device
    }
    assert store.origin() == other


def test_after_an_update_of_the_first_device_the_further_ones_are_stale(store: Store) -> None:
    store.commit(accepting({key(): 1.0}, origin=OTHER_WEIGHTS, update=recording(OTHER_WEIGHTS)))
    assert any("of mode 2-1 on cuda were measured with other weights" in p for p in verify(store))
    store.commit(accepting({key(): 2.0}, origin=replace(OTHER_WEIGHTS, device=CUDA.device)))
    assert cuda_file(store).values == {key(): 2.0}
    assert all("2-4" in problem for problem in verify(store))


def test_entries_are_dropped_from_the_files_of_all_kinds_if_asked(store: Store) -> None:
    update = Update(CUDA)
    update.drop("2-1", key())
    assert {change.file for change in store.preview(update)} == {FILE}
    update.everywhere = True
    assert {change.file for change in store.commit(update)} == {FILE, "accepted/2-1.txt"}
    assert key() not in values_for(store.all_accepted()["2-1"].values())


def _moved_here(store: Store) -> None:
    first = (store.folder / "accepted/2-1.txt").read_text()
    with (store.folder / FILE).open("a") as file:  # type: ignore[union-attr]
        file.write(next(line for line in first.splitlines(True) if "layers.5:" in line))


def _moved_away(store: Store) -> None:
    first = store.folder / "accepted/2-1.txt"
    line = next(
        line for line in (store.folder / FILE).read_text().splitlines(True) if " 3.0" in line
    )
    lines = first.read_text().splitlines(True)
    index = next(i for i, old in enumerate(lines) if old.split()[:4] == line.split()[:4])
    first.write_text("".join([*lines[:index], line, *lines[index + 1 :]]))


def _edited(old: str, new: str) -> object:
    def edit(store: Store) -> None:
        path = store.folder / FILE
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


def _copied(store: Store) -> None:
    (store.folder / FILE).write_bytes((store.folder / "accepted/2-1.txt").read_bytes())


def _of_another_kind(store: Store) -> None:
    (store.folder / FILE).rename(store.folder / FILE.replace("cuda", "npu"))  # type: ignore[arg-type]


FAULTS = {
    "value": (_edited(" 3.0", " 0.1"), "was edited, or is of another file"),
    "device": (_edited("sm_90", "sm_80"), "f:8: device cuda-sm_80-deadbeef was edited"),
    "kind": (_edited("cuda ", "npu "), "is no"),
    "other kind of device": (_edited("cuda-sm_90", "npu-sm_90"), "is not of kind cuda"),
    "line of the first": (_moved_here, "was edited, or is of another file"),
    "line of it in the first": (_moved_away, "was edited, or is of another file"),
    "first file copied": (_copied, "was copied or renamed"),
    "another kind's file": (_of_another_kind, "was copied or renamed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_of_this_kind_is_named(store: Store, fault: str) -> None:
    change, words = FAULTS[fault]
    if fault == "kind":
        change = _edited("# kind         cuda", "# kind         npu")
    change(store)  # type: ignore[operator]
    kind = "npu" if fault == "another kind's file" else "cuda"
    with pytest.raises(QgateError) as caught:
        store.accepted_on("2-1", kind)
    assert words.replace("f:8: ", "") in str(caught.value)
    assert verify(store) != []


def test_two_files_of_one_kind_are_a_problem(store: Store) -> None:
    rewrite(store.folder / "accepted/2-1.txt", lambda of: replace(of, device="cuda"))  # type: ignore[arg-type]
    (problem,) = verify(store)
    assert problem.endswith(
        "2-1.txt has the values of cuda. Remove " + problem.partition(" is not read")[0]
    )


def test_lines_that_git_merges_from_two_branches_are_valid(store: Store, tmp_path: Path) -> None:
    base = cuda_file(store)
    ours = replace(base, values={**base.values, key("layers.2:output"): 0.5})
    theirs = replace(
        base, values={**base.values, key("layers.30:output"): 0.7}, device="cuda-mixed"
    )
    for name, file in (("base", base), ("ours", ours), ("theirs", theirs)):
        (tmp_path / name).write_bytes(file.to_bytes())
    merge = ["git", "merge-file", "-p", "ours", "base", "theirs"]
    merged = subprocess.run(merge, cwd=tmp_path, capture_output=True, check=True).stdout
    merged_errors = read_accepted(merged, "f")
    assert merged_errors == replace(theirs, values=ours.values | theirs.values)
    assert inspect_accepted(merged, "f")[1] == []


@pytest.mark.parametrize("mode", ["2-1", "int8@cuda", "int8@fp16", "A b", "x.cuda", "@", "cuda"])
def test_no_mode_has_the_file_of_another_one_on_some_kind(mode: str) -> None:
    assert kind_in(accepted_file(mode)) == ""
    assert kind_in(accepted_file(mode, "cuda")) == "cuda"
    assert accepted_file(mode, "cuda").partition("@")[0] == accepted_file(mode)[: -len(".txt")]


def test_a_kind_can_be_the_first_and_the_only_one(tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    store.commit(accepting({key(): 1.0}, origin=CUDA, update=recording(CUDA)))
    assert verify(store) == []
    assert [*store.accepted_on("2-1", "cuda")] == [""]
    store.commit(accepting({key(): 2.0}))
    assert {kind: of.device for kind, of in store.all_accepted()["2-1"].items()} == {
        "": CUDA.device, "cpu": "cpu",
    }  # fmt: skip


def test_without_its_first_file_a_kind_keeps_its_own(store: Store) -> None:
    (store.folder / "accepted/2-1.txt").unlink()  # type: ignore[union-attr]
    store.commit(accepting({key(): 8.0}, origin=CUDA))
    assert {kind: of.values[Key(*key())] for kind, of in store.all_accepted()["2-1"].items()} == {
        "cuda": 8.0
    }
