"""A failing run leaves what it measured; only what fits the baseline is accepted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate import QgateError
from qgate.baselines import Candidate, Key, read_candidates, update_of, write_candidate
from tests.baselines.building import ORIGIN, OTHER_WEIGHTS, key, recorded

TEXT = st.text(max_size=8)
CANDIDATE = Candidate(ORIGIN, "2-1", "suites/test_x.py::test_a[2-1]", {key(): 0.125})


@given(st.dictionaries(st.builds(Key, TEXT, TEXT, TEXT, TEXT), st.floats(), min_size=1, max_size=4))
@settings(max_examples=40)
def test_a_candidate_comes_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[Key, float]
) -> None:
    candidate = replace(
        CANDIDATE, values=values, barred={min(values): "is too large"}, calibrated=False
    )
    path = write_candidate(tmp_path_factory.mktemp("out") / "candidates", candidate)
    candidates = read_candidates(path.parent)
    assert [(c.path, c.barred, c.calibrated) for c in candidates] == [
        (path, candidate.barred, False)
    ]
    assert [*map(repr, candidates[0].values.items())] == [*map(repr, values.items())]
    json.loads(path.read_bytes(), parse_constant=lambda name: pytest.fail(name))


def test_one_file_per_test_mode_and_model(tmp_path: Path) -> None:
    variants = [
        replace(CANDIDATE, mode="2-4"),
        replace(CANDIDATE, source="suites/test_x.py::test_b[2-1]"),
        replace(CANDIDATE, origin=replace(ORIGIN, model="large")),
    ]
    paths = [write_candidate(tmp_path, candidate) for candidate in (CANDIDATE, *variants)]
    assert len(set(paths)) == 4
    assert write_candidate(tmp_path, replace(CANDIDATE, values={key(): 2.0})) == paths[0]
    assert len(read_candidates(tmp_path)) == 4
    assert len(list(tmp_path.iterdir())) == 4


def test_candidates_become_an_update(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    cuda = replace(CANDIDATE, origin=replace(ORIGIN, device="cuda", torch="9"))
    free = replace(cuda, mode="mxfp4", calibrated=False, values={key(): 2.0})
    update, refused = update_of(ORIGIN, [cuda, free, replace(cuda, source="the same again")])
    assert refused == []
    store.commit(update)
    first, accepted = store.accepted_on("2-1", "cuda").values()
    other = store.accepted("mxfp4")
    assert other is not None
    assert (first.device, first.values[key()], len(first.values)) == ("cpu", 0.0001, 12)
    assert accepted.values == {key(): 0.125}
    assert (accepted.device, accepted.calibration) == ("cuda", ORIGIN.calibration)
    assert (other.device, other.calibration) == ("cuda", None)
    assert store.origin() == ORIGIN


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"origin": OTHER_WEIGHTS}, "other weights (3fa23fa23fa2… then, 91bc"),
        ({"origin": replace(ORIGIN, inputs="x")}, "other inputs"),
        ({"origin": replace(ORIGIN, samples=3)}, "10 samples, and there are 3 now"),
        ({"origin": replace(ORIGIN, model="large")}, "of model 'tiny', not of 'large'"),
        ({"origin": replace(ORIGIN, calibration="x")}, "another calibration"),
        ({"values": {key("a"): 1.0, key("b"): math.nan}}, "b local relative_mse is nan, which is never"),
        ({"values": {key(): math.inf}}, "is inf, which is never"),
        ({"barred": {key(): "breaks the limit 0.1"}}, "relative_mse breaks the limit 0.1"),
        ({"values": {key(): 9.0}}, "relative_mse is 9.0, and 0.125 in another candidate"),
    ],
)  # fmt: skip
def test_others_are_refused_by_name_and_whole(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    good = write_candidate(tmp_path / "a", CANDIDATE)
    bad = write_candidate(tmp_path / "b", replace(CANDIDATE, source="bad", **changed))
    candidates = read_candidates(good.parent) + read_candidates(bad.parent)
    update, refused = update_of(ORIGIN, candidates)
    assert update.values == {"2-1": {key(): 0.125}}
    assert len(refused) == 1
    assert refused[0].startswith(f"{bad.name} (mode 2-1): ")
    assert words in refused[0]


def test_a_calibration_that_does_not_matter_is_not_held_against_one() -> None:
    other = replace(CANDIDATE, origin=replace(ORIGIN, calibration="x"), calibrated=False)
    assert update_of(ORIGIN, [other])[1] == []


def test_candidates_of_two_devices_are_not_mixed() -> None:
    cuda = replace(CANDIDATE, origin=replace(ORIGIN, device="cuda"), source="b")
    with pytest.raises(QgateError, match="on cpu and on cuda: accept those of one device"):
        update_of(ORIGIN, [CANDIDATE, cuda])


def test_a_text_is_proposed_and_accepted(tmp_path: Path) -> None:
    text_key = Key("layer_outputs", "x:input", "local", "quantizer")
    write_candidate(tmp_path, replace(CANDIDATE, values={text_key: "nan per 32, floor"}))
    (candidate,) = read_candidates(tmp_path)
    assert candidate.values == {text_key: "nan per 32, floor"}
    update, refused = update_of(ORIGIN, [candidate])
    assert (update.values, refused) == ({"2-1": candidate.values}, [])


def test_one_of_the_version_before_is_refused_by_name(tmp_path: Path) -> None:
    path = write_candidate(tmp_path, CANDIDATE)
    path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 1'))
    with pytest.raises(
        QgateError, match=r"of version 1, and .* 2\. Delete the file, or run the su"
    ):
        read_candidates(tmp_path)


GOOD = CANDIDATE.to_bytes()
MALFORMED = {
    "cut off": (GOOD[:200], r"c.json:\d+: it is not valid JSON"),
    "nan": (GOOD.replace(b"0.125", b"NaN"), "NaN is no number"),
    "text": (GOOD.replace(b"0.125", b'"1"'), r"values\[0\].value is '1', not one of \['nan'"),
    "true": (GOOD.replace(b"0.125", b"true"), r"values\[0\].value is True"),
    "too large": (GOOD.replace(b"0.125", b"1" + b"0" * 400), "more than 64 bits"),
    "newer": (GOOD.replace(b'"version": 2', b'"version": 3'), "Update qgate"),
    "another file": (GOOD.replace(b'"candidate"', b'"baseline"'), "not a candidate of qgate"),
    "twice": (GOOD.replace(b"  {", b"  " + GOOD.splitlines()[-3].strip() + b",\n  {"), "is there twice"),
    "empty": (GOOD.replace(GOOD.splitlines()[-3], b""), "values is empty"),
    "site a number": (GOOD.replace(b'"layers.0:output"', b"3"), r"values\[0\].site is 3"),
    "flag": (GOOD.replace(b'"calibrated": true', b'"calibrated": 1'), "calibrated is 1, not true"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_candidate_is_named(tmp_path: Path, name: str) -> None:
    data, words = MALFORMED[name]
    (tmp_path / "c.json").write_bytes(data)
    with pytest.raises(QgateError, match=words) as caught:
        read_candidates(tmp_path)
    assert "c.json" in str(caught.value)


def test_no_folder_is_no_empty_folder(tmp_path: Path) -> None:
    assert read_candidates(tmp_path) == []
    with pytest.raises(QgateError, match=r"no folder .*nowhere"):
        read_candidates(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(QgateError, match="could not be written"):
        write_candidate(tmp_path / "file", CANDIDATE)


def test_candidates_of_two_arithmetics_are_of_neither() -> None:
    """Machines of one CI differ; nothing is then known but the kind of device."""
    origins = [replace(ORIGIN, device=f"cpu-{name}") for name in ("avx2-1", "avx512-2")]
    keys = [key()._replace(metric=name) for name in ("mae", "mse")]
    update, refused = update_of(
        ORIGIN,
        [
            replace(CANDIDATE, origin=o, values={k: 1e-3})
            for o, k in zip(origins, keys, strict=True)
        ],
    )
    assert not refused
    assert update.origin.device == "cpu"
    update, _ = update_of(ORIGIN, [replace(CANDIDATE, origin=origins[0])])
    assert update.origin.device == "cpu-avx2-1"
