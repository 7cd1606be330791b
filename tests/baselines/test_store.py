"""What is recorded comes back; what is not touched stays; what is tampered with is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from qgate import QgateError
from qgate.baselines import (
    BaselineRows,
    Key,
    Origin,
    ReferenceTensor,
    Store,
    Update,
    differences,
    stored_models,
)
from tests.adoption.repository import run
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
    state,
    tensors,
)


def test_a_baseline_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "er", "hf:some/path")
    assert (store.exists(), store.origin(), store.modes(), store.bases()) == (False, None, [], [])
    assert store.accepted("2-1") is None
    origin = replace(ORIGIN, model="hf:some/path", calibration=None, commit=None)
    update = accepting({key(): 0.25}, "my mode", update=recording(origin))
    changes = store.commit(update)
    assert store.exists()
    assert store.origin() == origin
    assert store.modes() == ["my mode"]
    assert store.bases() == ["plain"]
    reference = store.reference("plain")
    assert list(reference) == ["layers.0:output", "layers.1:output"]
    for site, tensor in tensors().items():
        assert reference[site].rows == tensor.rows == BaselineRows(3, 8, 12)
        assert reference[site].shape == (2, 6, 4)
        assert np.array_equal(reference[site].values, tensor.values)
    accepted = store.accepted("my mode")
    assert accepted is not None
    assert accepted.values == {key(): 0.25}
    assert (accepted.weights, accepted.calibration, accepted.device) == (
        origin.weights,
        None,
        "cpu",
    )
    assert accepted.stale(origin) == []
    assert stored_models(tmp_path / "deep" / "er") == ["hf:some/path"]
    assert stored_models(tmp_path / "nothing") == []
    entries = {(change.entry, change.old) for change in changes}
    assert (str(key()), None) in entries
    assert ("plain layers.0:output", None) in entries


def test_the_folder_holds_what_was_asked_for_and_nothing_else(tmp_path: Path) -> None:
    assert set(contents(recorded(tmp_path).folder)) == {
        "manifest.json",
        "reference-plain.safetensors",
        "reference-rotated.safetensors",
        "accepted/2-1.txt",
        "accepted/2-4.txt",
    }


def test_whole_tensors_of_any_shape_come_back(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 3), (2, 1, 3, 2)]
    update = Update(ORIGIN)
    by_site = {f"s{i}": ReferenceTensor.of(np.full(s, i, np.float32)) for i, s in enumerate(shapes)}
    update.set_reference("plain", by_site)
    store = Store(tmp_path, "tiny")
    store.commit(update)
    assert [t.values.shape for t in store.reference("plain").values()] == shapes


TEXT = st.text(max_size=8)


@given(
    st.dictionaries(
        st.builds(Key, TEXT, TEXT, TEXT, TEXT),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=4,
    ),
    st.text(min_size=1, max_size=8),
)
@settings(max_examples=25)
def test_any_key_and_mode_is_stored(
    tmp_path_factory: pytest.TempPathFactory, values: dict[Key, float], mode: str
) -> None:
    store = Store(tmp_path_factory.mktemp("root"), "tiny")
    store.commit(accepting({k: np.float32(v) for k, v in values.items()}, mode, update=recording()))  # type: ignore[misc]
    accepted = store.accepted(mode)
    assert accepted is not None
    assert accepted.values == values
    assert store.modes() == [mode]


# What is not touched stays ---------------------------------------------------------------------


def test_one_changed_value_changes_one_line_of_one_file(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = contents(store.folder)
    changes = store.commit(accepting({key("layers.3:output"): 9.0, key("layers.4:output"): 5e-4}))
    after = contents(store.folder)
    assert [name for name in after if after[name] != before[name]] == ["accepted/2-1.txt"]
    pair = (before["accepted/2-1.txt"].splitlines(), after["accepted/2-1.txt"].splitlines())
    changed = [(old, new) for old, new in zip(*pair, strict=True) if old != new]
    assert len(changed) == 1
    assert changed[0][1].split()[4] == b"9.0"
    assert [str(change) for change in changes] == [
        "accepted/2-1.txt: test_layer_outputs layers.3:output local relative_mse: 0.0004 -> 9"
    ]


@pytest.mark.parametrize(
    "update",
    [
        Update(ORIGIN),
        accepting({key(): 1e-4}),
        accepting({key(): 1e-4}, origin=replace(ORIGIN, torch="9", commit=None, device="cpu-avx2")),
        recording(bases=("plain", "rotated")),
        recording(replace(ORIGIN, torch="9", seed=4, commit="other", calibration=None)),
        dropping("2-1", key("nowhere")),
        dropping("no mode", key()),
    ],
    ids=[
        "empty", "same value", "same value elsewhere", "same references", "same references later",
        "no entry to drop", "no mode to drop",
    ],
)  # fmt: skip
def test_a_commit_without_a_change_touches_nothing(tmp_path: Path, update: Update) -> None:
    store = recorded(tmp_path)
    before = marks(tmp_path)
    assert store.commit(update) == []
    assert marks(tmp_path) == before


def test_an_empty_update_makes_no_baseline(tmp_path: Path) -> None:
    assert Store(tmp_path / "root", "tiny").commit(Update(ORIGIN)) == []
    assert list(tmp_path.iterdir()) == []


def test_the_last_call_for_a_key_counts(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    update = accepting({key(): 7.0, key("layers.1:output"): 7.0})
    update.drop("2-1", key())
    update.drop("2-1", key("layers.1:output"))
    update.set_accepted("2-1", key(), 8.0)
    store.commit(update)
    accepted = store.accepted("2-1")
    assert accepted is not None
    assert accepted.values[key()] == 8.0
    assert key("layers.1:output") not in accepted.values
    assert len(accepted.values) == 11


# Other weights, inputs, calibration, devices ---------------------------------------------------


def test_other_weights_make_other_modes_stale_and_drop_other_bases(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = contents(store.folder)
    update = accepting({key(): 3.0}, update=recording(OTHER_WEIGHTS, seed=1))
    changes = store.commit(update)
    assert store.origin() == OTHER_WEIGHTS
    assert store.bases() == ["plain"]
    assert "reference-rotated.safetensors" not in contents(store.folder)
    fresh, stale = store.accepted("2-1"), store.accepted("2-4")
    assert fresh is not None
    assert stale is not None
    assert fresh.values == {key(): 3.0}
    assert fresh.stale(OTHER_WEIGHTS) == []
    assert len(stale.stale(OTHER_WEIGHTS)) == 1
    assert contents(store.folder)["accepted/2-4.txt"] == before["accepted/2-4.txt"]
    changed = {change.entry: (change.old, change.new) for change in changes}
    assert changed["weights"] == (ORIGIN.weights, OTHER_WEIGHTS.weights)
    assert changed["rotated layers.0:output"][1] is None
    assert changed[str(key("layers.5:output"))][1] is None


@pytest.mark.parametrize("field", ["weights", "inputs", "samples", "seqlen"])
def test_errors_are_not_accepted_against_other_references(tmp_path: Path, field: str) -> None:
    store = recorded(tmp_path)
    before = marks(tmp_path)
    other = 11 if field in ("samples", "seqlen") else "0" * 64
    origin = replace(ORIGIN, **{field: other})  # type: ignore[arg-type]
    with pytest.raises(
        QgateError, match=f"nothing was accepted: .*{field.replace('seqlen', 'tokens')}"
    ):
        store.commit(accepting({key(): 3.0}, origin=origin))
    assert marks(tmp_path) == before


def test_nothing_is_accepted_where_nothing_was_recorded(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match=r"no baseline of tiny .* --update-baselines"):
        Store(tmp_path, "tiny").commit(accepting({key(): 3.0}))


def test_another_calibration_makes_calibrated_modes_stale(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    update = accepting({key(): 2.0}, "mxfp4")
    update.without_calibration("mxfp4")
    store.commit(update)
    now = replace(ORIGIN, calibration="beef" * 16)
    store.commit(accepting({key(): 3.0}, origin=now))
    assert store.origin() == now
    stale = {
        mode: accepted.stale(now) for mode in store.modes() if (accepted := store.accepted(mode))
    }
    assert {mode: len(sentences) for mode, sentences in stale.items()} == {"2-1": 0, "2-4": 1, "mxfp4": 0}  # fmt: skip
    accepted = store.accepted("2-1")
    assert accepted is not None
    assert accepted.values == {key(): 3.0}


def test_a_run_without_a_calibration_keeps_the_recorded_one(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    store.commit(recording(replace(ORIGIN, calibration=None), seed=5))
    assert store.origin() == ORIGIN
    store.commit(recording(replace(OTHER_WEIGHTS, calibration=None), seed=5))
    assert store.origin() == replace(OTHER_WEIGHTS, calibration=None)


def test_the_attributes_in_the_docs_keep_references_alone_with_git_lfs(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "baselines.md").read_text()
    (line,) = (line for line in page.splitlines() if "filter=lfs" in line)
    (tmp_path / ".gitattributes").write_text(f"{line}\n")
    run(["git", "init"], tmp_path)
    recorded(tmp_path / "baselines")
    names = contents(tmp_path / "baselines")
    for name in names:
        command = ["git", "check-attr", "filter", "--", f"baselines/{name}"]
        in_lfs = run(command, tmp_path).strip().endswith("filter: lfs")
        assert in_lfs == name.startswith("tiny/reference-"), name
    assert sum(name.startswith("tiny/reference-") for name in names) == 2


def test_a_reference_that_git_lfs_has_not_fetched_says_so(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    pointer = store.folder / "reference-plain.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(QgateError, match=r"is a pointer of git LFS, .*: run `git lfs pull`"):
        store.reference("plain")


def test_values_of_two_arithmetics_of_a_kind_are_called_mixed(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    other = replace(ORIGIN, device="cpu-avx2")

    def device() -> str:
        accepted = store.accepted("2-1")
        assert accepted is not None
        return accepted.device

    store.commit(accepting({key(): 3.0}, origin=other))
    assert device() == "cpu-mixed"
    store.commit(accepting({key(): 4.0}))
    assert device() == "cpu-mixed"
    store.commit(accepting({key(f"layers.{i}:output"): 4.0 for i in range(12)}, origin=other))
    assert device() == "cpu-avx2"
    store.commit(accepting({key(): 5.0}, origin=other))
    assert device() == "cpu-avx2"
    assert store.origin() == ORIGIN


def test_differences_are_sentences() -> None:
    assert differences(ORIGIN, ORIGIN) == []
    assert differences(ORIGIN, replace(ORIGIN, torch="9", commit=None, seed=3)) == []
    assert differences(ORIGIN, OTHER_WEIGHTS) == [
        "the baseline was made with other weights (3fa23fa23fa2… then, 91bc91bc91bc… now)"
    ]
    now = Origin("other", ORIGIN.weights, "5", None, 4, 64, 0, "cuda", "2.8.0", None)
    assert differences(ORIGIN, now) == [
        "the baseline is of model 'tiny', not of 'other'",
        "the baseline was made with 10 samples, and there are 4 now (--samples 10)",
        "the baseline was made with sequences of 512 tokens, and they have 64 now (--seqlen 512)",
        "the baseline was made with other inputs (77aa77aa77aa… then, 5 now)",
        "the baseline was made with another calibration (c0dec0dec0de… then, none now)",
        "the baseline was made on cpu, and this run is on cuda",
    ]


def test_hashes_that_begin_alike_are_shown_where_they_differ() -> None:
    sentence = differences(ORIGIN, replace(ORIGIN, weights=ORIGIN.weights[:-1] + "x"))[0]
    assert "x now" in sentence


# What is never stored --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400, True, "1", None],
)
def test_values_that_are_no_finite_number_are_refused(value: Any) -> None:
    update = Update(ORIGIN)
    with pytest.raises(
        QgateError, match=r"mode 2-1, test_layer_outputs layers.0:output local relative_mse"
    ):
        update.set_accepted("2-1", key(), value)
    assert update.modes() == []


def bad(**changed: Any) -> dict[str, ReferenceTensor]:
    return {"norm:output": replace(ReferenceTensor.of(np.ones((2, 3), np.float32)), **changed)}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, "no tensor at all"),
        (bad(values=np.full((2, 3), np.nan, np.float32)), "'norm:output' in basis 'plain' has 6 values that are not finite"),
        (bad(values=np.ones((2, 3))), "float64"),
        (bad(values=np.ones((3, 2), np.float32)), r"\(3, 2\)"),
        (bad(values=np.ones((0, 3), np.float32), shape=(0, 3)), "no values"),
        ({"": bad()["norm:output"]}, "no name of a site"),
        ({"__metadata__": bad()["norm:output"]}, "no name of a site"),
    ],
)  # fmt: skip
def test_bad_references_are_refused(made: dict[str, ReferenceTensor], words: str) -> None:
    update = Update(ORIGIN)
    with pytest.raises(QgateError, match=words):
        update.set_reference("plain", made)
    assert not update.references


def test_a_basis_does_not_name_a_path() -> None:
    with pytest.raises(QgateError, match=r"basis '\.\./x' is not allowed"):
        Update(ORIGIN).set_reference("../x", tensors())


def test_a_reference_is_what_it_was_when_it_was_set(tmp_path: Path) -> None:
    array = np.ones((2, 3), np.float32)
    update = Update(ORIGIN)
    update.set_reference("plain", {"s": ReferenceTensor.of(array)})
    array[:] = np.nan
    store = Store(tmp_path, "tiny")
    store.commit(update)
    assert (store.reference("plain")["s"].values == 1).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", ""), ("weights", None), ("calibration", ""), ("samples", 0), ("samples", True), ("seqlen", 1.5), ("seed", -1), ("device", "tpu!")],
)  # fmt: skip
def test_an_origin_is_checked(field: str, value: Any) -> None:
    with pytest.raises(QgateError, match=f"{field} .* is not allowed"):
        replace(ORIGIN, **{field: value})


def test_an_update_is_of_its_model(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match="update of 'tiny' is not one of 'large'"):
        Store(tmp_path, "large").commit(recording())


# What is tampered with -------------------------------------------------------------------------


def test_models_and_modes_whose_names_are_alike_stay_apart(tmp_path: Path) -> None:
    names = ["hf:some/path", "hf:some-path", "hf-some-path", "HF:some/path", "hf some path"]
    for number, name in enumerate(names, 1):
        update = recording(replace(ORIGIN, model=name))
        for mode in names:
            update.set_accepted(mode, key(), number)
        Store(tmp_path, name).commit(update)
    assert sorted(stored_models(tmp_path)) == sorted(names)
    for number, name in enumerate(names, 1):
        assert Store(tmp_path, name).modes() == sorted(names)
        for mode in names:
            accepted = Store(tmp_path, name).accepted(mode)
            assert accepted is not None
            assert accepted.values == {key(): float(number)}


def test_a_copied_folder_or_file_is_not_taken_for_another(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    accepted = store.folder / "accepted"
    (accepted / "2-3.txt").write_bytes((accepted / "2-1.txt").read_bytes())
    with pytest.raises(QgateError, match="is of mode '2-1', and not of '2-3'"):
        store.accepted("2-3")
    store.folder.rename(tmp_path / "large")
    with pytest.raises(QgateError, match="is of model 'tiny', and not of 'large'"):
        Store(tmp_path, "large").origin()


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def shuffled(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def apply(_: bytes) -> bytes:
        arrays: dict[str, Any] = {site: t.values for site, t in tensors().items()}
        change(arrays)
        return save(arrays)

    return apply


TAMPERED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a bit": (flipped, "'layers.1:output' is not the one in the manifest, its SHA-256"),
    "cut off": (lambda data: data[:-7], "damaged"),
    "empty": (lambda _: b"", "damaged"),
    "no tensors at all": (lambda _: b"hello, this is text", "damaged"),
    "one missing": (shuffled(lambda a: a.pop("layers.1:output")), "'layers.1:output' is in the manifest but not"),
    "one more": (shuffled(lambda a: a.update(x=np.ones(1, np.float32))), "'x' is in it but not in the manifest"),
    "half precision": (shuffled(lambda a: a.update({"layers.1:output": np.ones((8, 4), np.float16)})), "float16"),
    "other shape": (shuffled(lambda a: a.update({"layers.1:output": np.ones((4, 8), np.float32)})), r"shape \(4, 8\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_reference_is_refused_and_recorded_again(tmp_path: Path, name: str) -> None:
    change, words = TAMPERED[name]
    store = recorded(tmp_path)
    good = state(store)
    path = store.folder / "reference-plain.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(QgateError, match=f"reference-plain.safetensors: .*{words}.*[Rr]estore"):
        store.reference("plain")
    assert [str(c) for c in store.commit(recording())] == [
        "reference-plain.safetensors: all tensors: damaged -> restored"
    ]
    assert state(store) == good


def test_a_missing_reference_is_an_error_and_recorded_again(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    good = state(store)
    (store.folder / "reference-plain.safetensors").unlink()
    with pytest.raises(QgateError, match="is missing: restore it"):
        store.reference("plain")
    with pytest.raises(QgateError, match=r"unknown basis .* Allowed: plain, rotated"):
        store.reference("spun")
    with pytest.raises(QgateError, match=r"no baseline of large .* --update-baselines"):
        Store(tmp_path, "large").reference("plain")
    store.commit(recording())
    assert state(store) == good


def edited(*path: Any, to: Any) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        record = json.loads(data)
        node = record
        for step in path[:-1]:
            node = node[step]
        if to is ...:
            del node[path[-1]]
        else:
            node[path[-1]] = to
        return json.dumps(record).encode()

    return apply


TENSOR = ("references", "plain", "tensors", 0)
MALFORMED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[:100], r"manifest.json:\d+: it is not valid JSON"),
    "merge conflict": (lambda data: data.replace(b' "seed"', b'<<<<<<< HEAD\n "seed"'), r"manifest.json:10: it is not valid JSON"),
    "not UTF-8": (lambda data: data.replace(b"tiny", b"\xff"), "JSON that qgate cannot read"),
    "a list": (lambda _: b"[]", "it is list, not an object"),
    "nested without end": (lambda _: b"[" * 100_000, "JSON that qgate cannot read"),
    "a key twice": (lambda data: data.replace(b' "seed": 0,', b' "seed": 0, "seed": 1,'), "'seed' is there twice"),
    "nan": (lambda data: data.replace(b' "seed": 0,', b' "seed": NaN,'), "NaN is no number"),
    "another file": (edited("qgate", to="calibration"), "not a baseline of qgate"),
    "newer": (edited("version", to=3), "version 3, and this qgate reads version 2. Update qgate"),
    "unknown field": (edited("more", to=1), "'more' is not a known field"),
    "no weights": (edited("weights", to=...), "weights is missing"),
    "weights a number": (edited("weights", to=1), "weights is 1, not a text"),
    "samples true": (edited("samples", to=True), "samples is True, not a whole number"),
    "device": (edited("device", to="TPU"), "device 'TPU' is not allowed"),
    "no references": (edited("references", to={}), "references is empty"),
    "file elsewhere": (edited("references", "plain", "file", to="../x"), "references.plain.file is not"),
    "tensors no list": (edited("references", "plain", "tensors", to={}), "tensors is dict, not a list"),
    "no tensors": (edited("references", "plain", "tensors", to=[]), "references.plain.tensors is empty"),
    "shape": (edited(*TENSOR, "shape", to=[2, -6, 4]), r"references.plain.tensors\[0\].shape\[1\] is -6, not from 0"),
    "dtype": (edited(*TENSOR, "dtype", to="int8"), "dtype is 'int8', not 'float32'"),
    "site twice": (edited(*TENSOR, "site", to="layers.1:output"), "'layers.1:output' is there twice"),
    "more rows than there are": (edited(*TENSOR, "rows", "count", to=13), "draws 13 of 12 rows"),
    "rows of another shape": (edited(*TENSOR, "rows", "of", to=24), r"of 24 rows, but shape \[2, 6, 4\] has 12"),
    "rows without seed": (edited(*TENSOR, "rows", "seed", to=...), "rows.seed is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_manifest_is_named(tmp_path: Path, name: str) -> None:
    change, words = MALFORMED[name]
    store = recorded(tmp_path)
    path = store.folder / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    before = marks(tmp_path)
    for attempt in (
        store.origin,
        lambda: store.reference("plain"),
        lambda: store.commit(accepting({key(): 3.0})),
    ):
        with pytest.raises(QgateError, match=words) as caught:
            attempt()
        assert "manifest.json" in str(caught.value)
        assert "--update-baselines" in str(caught.value) or "Update qgate" in str(caught.value)
    assert store.exists()
    assert marks(tmp_path) == before


def test_a_malformed_mode_does_not_hinder_another_one(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    path = store.folder / "accepted" / "2-4.txt"
    path.write_text("<<<<<<< HEAD\n")
    store.commit(accepting({key(): 3.0}))
    with pytest.raises(QgateError, match=r"2-4.txt:1: it is no list"):
        store.commit(accepting({key(): 3.0}, "2-4"))
    assert path.read_text() == "<<<<<<< HEAD\n"


def test_a_tensor_is_one_line_of_the_manifest(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    before = (store.folder / "manifest.json").read_text().splitlines()
    by_site = tensors()
    by_site["layers.1:output"] = tensors(9)["layers.1:output"]
    update = Update(ORIGIN)
    update.set_reference("plain", by_site)
    assert [change.entry for change in store.commit(update)] == ["plain layers.1:output"]
    after = (store.folder / "manifest.json").read_text().splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 2, "the tensor and the digest"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    path = store.folder / "accepted" / "2-1.txt"
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(QgateError, match=r"2-1.txt' cannot be read: No such file"):
        store.accepted("2-1")
