"""Verifying finds what is wrong; dropping entries removes them and only them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.baselines import Store, verify
from qgate.baselines.manifest import edits_of
from tests.baselines.building import (
    ORIGIN,
    OTHER_WEIGHTS,
    accepting,
    contents,
    dropping,
    key,
    marks,
    recorded,
    recording,
)

ROOT = Path(__file__).resolve().parents[2]


def test_a_sound_baseline_has_no_problem(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = marks(tmp_path)
    assert verify(store) == []
    assert marks(tmp_path) == before


def edit(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new, 1))

    return change


def empty(folder: Path) -> None:
    for name in contents(folder):
        (folder / name).unlink()


def swap_lines(folder: Path) -> None:
    path = folder / "accepted/2-1.txt"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-2], lines[-1], lines[-2]]))


PROBLEMS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing there": (empty, ["manifest.json: it is missing"]),
    "malformed manifest": (edit("manifest.json", b"{", b"["), ["manifest.json:", "no file of this baseline", "no file of this"]),
    "newer manifest": (edit("manifest.json", b'"version": 2', b'"version": 9'), ["reads version 2. Update qgate", "no file", "no file"]),
    "another model": (edit("manifest.json", b'"tiny"', b'"large"'), ["manifest.json: it was edited", "it is of model 'large'"]),
    "manifest without its digest": (edit("manifest.json", b'"digest": "', b'"device2": "'), ["manifest.json", "no file of this", "no file of this"]),
    "digest of another spelling": (edit("manifest.json", b'"digest"', b'"\\u0064igest"'), ["manifest.json: it was edited"]),
    "manifest of an earlier version": (edit("manifest.json", b'"version": 2', b'"version": 1'), ["version 1, and this qgate reads version 2. Restore the file", "no file", "no file"]),
    "damaged tensor": (edit("reference-plain.safetensors", b"\x00", b"\x01"), ["reference-plain.safetensors: "]),
    "missing tensors": (lambda f: (f / "reference-plain.safetensors").unlink(), ["reference-plain.safetensors: it is missing"]),
    "two malformed lines": (
        lambda f: (edit("accepted/2-1.txt", b" 0.0002", b" x")(f), edit("accepted/2-1.txt", b" 0.0012", b" inf")(f)),
        ["accepted/2-1.txt:11: 'x' is no number", "accepted/2-1.txt:21: test_layer_outputs layers.11:output local relative_mse is inf"],
    ),
    "newer accepted": (edit("accepted/2-1.txt", b"version 3", b"version 5"), ["Update qgate"]),
    "earlier accepted": (edit("accepted/2-1.txt", b"version 3", b"version 2"), ["version 2, and this qgate reads version 3. Restore the file from"]),
    "manifest without digest": (lambda f: (f / "manifest.json").write_text(
        (f / "manifest.json").read_text().rpartition(',\n "digest"')[0] + "\n}\n"), ["manifest.json", "no file", "no file"]),
    "renamed mode": (lambda f: (f / "accepted/2-1.txt").rename(f / "accepted/2-2.txt"), ["2-2.txt: it is of mode '2-1'"]),
    "accepted of another model": (edit("accepted/2-1.txt", b"tiny", b"large"), ["all 12 lines: they were recorded for another header", "2-1.txt: it is of model 'large'"]),
    "out of order": (swap_lines, ["2-1.txt: its lines are not in the order"]),
    "foreign file": (lambda f: (f / "notes.md").touch(), ["notes.md: it is no file of this baseline"]),
    "foreign accepted": (lambda f: (f / "accepted" / "2-1.txt.orig").touch(), ["2-1.txt.orig: it is no file of"]),
    "leftover": (lambda f: (f / ".manifest.json.new").touch(), [".manifest.json.new: it is the rest of an update"]),
    "half an update": (lambda f: (f / ".update").write_text("{"), [".update: it is the rest"]),
}  # fmt: skip


def test_manifests_of_this_repository_have_digests() -> None:
    paths = sorted((ROOT / "baselines").glob("*/manifest.json"))
    assert len(paths) >= 6
    for path in paths:
        data = path.read_bytes()
        assert edits_of(data, path.name) == []
        assert edits_of(data.replace(b'"cpu-', b'"cpv-'), path.name)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_found_and_named(tmp_path: Path, name: str) -> None:
    change, words = PROBLEMS[name]
    store = recorded(tmp_path)
    change(store.folder)
    before = contents(store.folder)
    problems = verify(store)
    assert len(problems) == len(words), problems
    for word in words:
        assert any(word in problem for problem in problems), problems
    assert contents(store.folder) == before


def test_stale_errors_are_found(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    store.commit(accepting({key(): 3.0}, update=recording(OTHER_WEIGHTS, seed=1)))
    problems = verify(store)
    assert len(problems) == 1
    assert (
        "2-4.txt: the accepted errors of mode 2-4 were measured with other weights" in problems[0]
    )


def test_nothing_there_is_a_problem(tmp_path: Path) -> None:
    assert "there is no baseline" in verify(Store(tmp_path, "tiny"))[0]


def test_a_mode_without_accepted_errors_loses_its_file(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = contents(store.folder)
    changes = store.commit(dropping("2-4", key()))
    assert {change.file for change in changes} == {"accepted/2-4.txt"}
    assert all(change.new is None for change in changes)
    assert (changes[-1].entry, changes[-1].old) == (str(key()), 0.5)
    assert store.accepted("2-4") is None
    assert store.modes() == ["2-1"]
    before.pop("accepted/2-4.txt")
    assert contents(store.folder) == before


def test_dropped_errors_leave_stale_ones_stale(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    store.commit(recording(OTHER_WEIGHTS, seed=1))
    before = store.accepted("2-1")
    assert before is not None
    store.commit(
        dropping("2-1", *(dropped_key for dropped_key in before.values if dropped_key != key()))
    )
    after = store.accepted("2-1")
    assert after is not None
    assert (after.weights, after.values) == (ORIGIN.weights, {key(): 1e-4})
    assert store.modes() == ["2-1", "2-4"]
