"""`qgate layers compare`: numbers as numpy has them, and everything it must not let pass."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qgate.cli import main
from qgate.comparing.layer_files import CaptureSettings, writing
from qgate.comparing.texts import comparison_lines
from qgate.gate import failure_text
from qgate.metrics.grades import grades_of
from tests.gate.making import ACCEPTED, carried, verdict
from tests.shares import proof

pytestmark = pytest.mark.usefixtures("here")
SMALL = ["--samples", "1", "--seqlen", "64", "--set", "calib_samples=1", "--set", "calib_seqlen=64"]
Capsys = pytest.CaptureFixture[str]
Array = np.ndarray[Any, Any]
OF = CaptureSettings(
    mode="fp32", model="net", basis="plain", weights="aa" * 32, inputs="bb" * 32, calibration=None,
    samples=2, seqlen=8, seed=0, device="cpu", torch="2", qgate="0", created="now",
)  # fmt: skip
DRAW = np.random.default_rng(3)
R = [DRAW.standard_normal((12, 6)).astype(np.float32) for _ in range(3)]
A = [(r + 0.01 * DRAW.standard_normal((12, 6))).astype(np.float32) for r in R]


def dump(
    of: CaptureSettings, layers: Mapping[int, Array], split: int = 7, casts: Any = None
) -> None:
    """Two samples of different length."""
    folder = Path("layer_outputs")
    folder.mkdir(exist_ok=True)
    sites = {f"layer_{i}": f"layers.{i}:output" for i in layers}
    with writing(folder, of, sites) as writer:
        for index, values in layers.items():
            for part in (values[:split], values[split:]):
                writer.add(f"layer_{index}", torch.from_numpy(part))
        writer.casts = casts or {}


def both(actual: Mapping[int, Array], reference: Mapping[int, Array], **changed: Any) -> None:
    dump(OF, reference)
    dump(replace(OF, mode="m", **changed), actual)


def standard() -> None:
    both({0: A[0], 1: A[1], 2: A[2]}, {0: R[0], 1: R[1], 2: R[2]})


def compare(*argv: str) -> int:
    return main(["layers", "compare", *(argv or ["m"])])


def record(expected: int = 0, mode: str = "m") -> dict[str, Any]:
    """The saved JSON, which has to be JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert compare(mode, "--save-comparison", "deep/er/c.json") == expected
    text = Path("deep/er/c.json").read_text(encoding="utf-8")
    comparison: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return comparison


def complaint(capsys: Capsys, *argv: str) -> str:
    assert compare(*argv) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("qgate layers compare: ")
    assert out == ""
    return err


def file(layer: int = 0, mode: str = "m") -> Path:
    return Path(f"layer_outputs/mode_{mode}_layer_{layer}.npy")


def edited(mode: str = "m") -> tuple[Path, dict[str, Any]]:
    path = Path(f"layer_outputs/mode_{mode}_stats.json")
    return path, json.loads(path.read_text(encoding="utf-8"))


# What is said --------------------------------------------------------------------------------


def test_every_number_is_that_of_the_plain_formula() -> None:
    standard()
    comparison = record()
    assert (comparison["compared_mode"], comparison["reference_mode"]) == ("m", "fp32")
    for index in range(3):
        layer = comparison["layers"][f"layer_{index}"]
        a, r = A[index].astype(np.float64), R[index].astype(np.float64)
        d = a - r
        expected = {
            "fp_mean": r.mean(), "fp_std": r.std(), "fp_min": r.min(), "fp_max": r.max(),
            "mode_mean": a.mean(), "mode_std": a.std(), "mode_min": a.min(), "mode_max": a.max(),
            "diff_mean": d.mean(), "diff_std": d.std(),
            "abs_diff_mean": np.abs(d).mean(), "abs_diff_max": np.abs(d).max(),
            "mse": (d**2).mean(), "rmse": np.sqrt((d**2).mean()), "mae": np.abs(d).mean(),
            "relative_mse": (d**2).mean() / (r**2).mean(),
            "relative_mae": np.abs(d).mean() / np.abs(r).mean(),
            "correlation": np.corrcoef(a.ravel(), r.ravel())[0, 1],
            "cosine": (a * r).sum() / np.sqrt((a**2).sum() * (r**2).sum()),
            "sqnr_db": 10 * np.log10((r**2).sum() / (d**2).sum()),
        }  # fmt: skip
        np.testing.assert_allclose([layer[k] for k in expected], list(expected.values()), rtol=1e-9)
        for q in (50, 90, 95, 99):
            exact = np.percentile(np.abs(d), q, method="inverted_cdf")
            assert layer[f"abs_diff_p{q}"] == exact
        assert layer["sign_flips"] == int((np.sign(a) * np.sign(r) < 0).sum())
        assert layer["reasons"] == {}
        worst = int((d**2).sum(axis=1).argmax())
        token = layer["worst_token"]
        assert (token["index"], token["sample"]) == (worst, int(worst >= 7))
        assert token["token"] == worst - 7 * (worst >= 7)
    averages = [
        np.mean([v[k] for v in comparison["layers"].values()]) for k in ("mse", "correlation")
    ]
    summary = comparison["summary"]
    np.testing.assert_allclose([summary["avg_mse"], summary["avg_correlation"]], averages)


def test_the_text_is_the_one_users_know(capsys: Capsys) -> None:
    standard()
    assert compare() == 0
    text = capsys.readouterr().out
    for word in ("Layer 0", "Layer 2", "mean=", "std=", "abs max=", "p99=", "Relative MSE", "SQNR"):
        assert word in text
    heads = next(line for line in text.splitlines() if line.startswith("Layer  "))
    assert heads.split() == ["Layer", "MSE", "RMSE", "MAE", "Correlation", "Grades"]
    mse = np.square(A[0].astype(np.float64) - R[0]).mean()
    assert f"{mse:.6e}" in text
    assert "Averages over layers" in text
    assert "Worst layer by relative MSE" in text


# By hand, from the bands: MSE 1e-4, 1e-3, 1e-2; correlation 0.9999, 0.999, 0.99.
@pytest.mark.parametrize(
    ("noise", "mse", "correlation"),
    [
        (3e-3, "excellent", "excellent"),
        (2e-2, "good", "good"),
        (3e-2, "good", "good"),
        (8e-2, "fair", "fair"),
        (1.2e-1, "poor", "fair"),
        (0.5, "poor", "poor"),
    ],
)
def test_a_number_has_the_word_that_pytest_suites_gives_it(
    noise: float, mse: str, correlation: str, capsys: Capsys
) -> None:
    draw = np.random.default_rng(7)
    r = draw.standard_normal((12, 600)).astype(np.float32)
    both({0: (r + noise * draw.standard_normal(r.shape)).astype(np.float32)}, {0: r})
    layer = record()["layers"]["layer_0"]
    assert layer["grades"] == {"mse": mse, "correlation": correlation}
    lines = capsys.readouterr().out.splitlines()
    block = [line.split() for line in lines if line.startswith(("  MSE  ", "  Correlation  "))]
    assert [cells[2] for cells in block[:2]] == [mse, correlation]
    values = {key: layer[key] for key in ("mse", "correlation")}
    failure = failure_text(
        verdict(carried(values={**ACCEPTED, "relative_mse": 1.0, **values})), "m"
    )
    (numbers,) = [line for line in failure.splitlines() if "carried: " in line]
    assert [part.split()[-2] for part in numbers.split(", ")] == ["MSE", "correlation"]
    assert not {"excellent", "good", "fair", "poor"} & set(re.findall(r"\w+", failure)), (
        "a failure praises nothing"
    )


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("mse", 9.99999999e-5, "excellent"),
        ("mse", 1e-4, "good"),
        ("mse", 1e-2, "poor"),
        ("correlation", 0.99990000001, "excellent"),
        ("correlation", 0.9999, "good"),
        ("correlation", 0.99, "poor"),
    ],
)
def test_at_the_edge_of_a_band_the_figures_are_in_the_band_of_the_word(
    key: str, value: float, word: str, capsys: Capsys
) -> None:
    standard()
    comparison = record()
    comparison["layers"]["layer_0"][key] = value
    capsys.readouterr()
    (line,) = [
        line
        for line in comparison_lines(
            {**comparison, "layers": {"layer_0": comparison["layers"]["layer_0"]}}
        )
        if line.startswith({"mse": "  MSE  ", "correlation": "  Correlation  "}[key])
    ][:1]
    text, band = line.split()[1:]
    assert band == word
    assert grades_of({key: float(text)}) == {key: word}


def test_bands_are_said_and_percentiles_are_exact(capsys: Capsys) -> None:
    standard()
    assert record()["percentile_error"] == 0
    text = capsys.readouterr().out
    assert "Percentiles of |difference|:" in text
    assert compare("--all") == 0
    for output in (text, capsys.readouterr().out):
        assert "MSE excellent < 1e-4, good < 1e-3, fair < 1e-2, else poor" in output
        assert "correlation excellent > 0.9999, good > 0.999, fair > 0.99, else poor" in output


def test_a_value_that_is_no_number_is_graded_as_pytest_suites_does(capsys: Capsys) -> None:
    odd = R[0].copy()
    odd[0, 0] = math.nan
    both({0: odd}, {0: R[0]})
    assert record(1)["layers"]["layer_0"]["grades"] == {"mse": "poor", "correlation": "poor"}
    assert "not finite poor" in capsys.readouterr().out


def test_small_tensors_have_their_true_relative_error() -> None:
    tiny = np.float32(2.0**-40)
    both({0: A[0] * tiny}, {0: R[0] * tiny})
    small = record()["layers"]["layer_0"]
    both({0: A[0]}, {0: R[0]})
    large = record()["layers"]["layer_0"]
    for key in ("relative_mse", "relative_mae", "correlation", "sqnr_db"):
        assert small[key] == pytest.approx(large[key], rel=1e-12)


def test_a_zero_reference_is_said_and_a_constant_one_has_a_correlation(capsys: Capsys) -> None:
    both({0: A[0], 1: A[1]}, {0: R[0] * 0, 1: R[1] * 0 + 3})
    comparison = record()
    zero, constant = comparison["layers"]["layer_0"], comparison["layers"]["layer_1"]
    assert zero["relative_mse"] is None
    assert zero["reasons"]["relative_mse"] == "reference energy zero"
    assert "reference energy zero" in capsys.readouterr().out
    assert (zero["correlation"], constant["correlation"]) == (0.0, 0.0)
    assert constant["constant"] == ["fp"]
    both({0: R[0] * 0 + 3}, {0: R[0] * 0 + 3})
    same = record()["layers"]["layer_0"]
    assert (same["correlation"], same["mse"], same["diff_std"]) == (1.0, 0.0, 0.0)
    assert same["sqnr_db"] is None
    assert same["reasons"]["sqnr_db"] == "no error"


def test_equal_statistics_are_not_taken_for_equal_outputs() -> None:
    both({0: R[0][::-1].copy()}, {0: R[0]})
    layer = record()["layers"]["layer_0"]
    assert layer["mode_std"] == pytest.approx(layer["fp_std"], rel=1e-12)
    assert layer["relative_mse"] > 0.1


def test_one_bad_channel_is_named() -> None:
    bad = R[0].copy()
    bad[:, 4] *= 1.2
    both({0: bad}, {0: R[0]})
    channel = record()["layers"]["layer_0"]["worst_channel"]
    assert (channel["index"], channel["share"]) == (4, 1.0)
    assert channel["relative_mse"] == pytest.approx(0.04, rel=1e-5)


def test_the_largest_distance_counts_floats_between() -> None:
    near = R[0].copy()
    near[3, 2] = np.nextafter(np.nextafter(near[3, 2], np.float32(9)), np.float32(9))
    both({0: near}, {0: R[0]})
    assert record()["layers"]["layer_0"]["max_ulp"] == 2


@pytest.mark.parametrize("where", ["mode", "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails(where: str, value: float, capsys: Capsys) -> None:
    odd = R[1].copy()
    odd[8, 2] = value
    sides = ({0: R[0], 1: odd}, {0: R[0], 1: R[1]})
    both(*(sides if where == "mode" else sides[::-1]))
    comparison = record(1)
    layer = comparison["layers"]["layer_1"]
    assert layer["mse"] is None
    assert "not finite" in layer["reasons"]["mse"]
    side = "mode" if where == "mode" else "fp"
    assert layer[f"{side}_nonfinite"]["total"] == 1
    assert layer["first_nonfinite"] == [8, 2]
    assert comparison["summary"]["avg_mse"] is None
    assert "layer_1" in comparison["summary"]["reasons"]["avg_mse"]
    assert comparison["layers"]["layer_0"]["mse"] == 0.0
    assert "FAILED: layer_1: 1 values" in capsys.readouterr().out


def test_equal_infinities_at_one_place_fail_too() -> None:
    odd = R[0].copy()
    odd[0, 0] = math.inf
    both({0: odd}, {0: odd})
    assert record(1)["layers"]["layer_0"]["mse"] is None


def test_what_a_cast_to_integers_hid_fails(capsys: Capsys) -> None:
    dump(OF, {0: R[0]})
    counts = {"layers.0.cast": {"values": 72, "saturated": 3, "nonfinite": 2}}
    dump(replace(OF, mode="m"), {0: A[0]}, casts=counts)
    assert compare() == 1
    assert "2 values that were not finite became integers" in capsys.readouterr().out


@proof
def test_memory_does_not_grow_with_the_files() -> None:
    standard()
    compare()  # what is loaded once does not count
    rows = np.zeros((1 << 14, 512), np.float32)  # 32 MiB
    rows[:, 0] = 1
    both({0: rows}, {0: rows})
    del rows
    tracemalloc.start()
    try:
        assert compare() == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20  # a few portions of float64, not 64 MiB of float32 and copies


# What is refused -----------------------------------------------------------------------------


def test_a_changed_file_is_refused(capsys: Capsys) -> None:
    standard()
    data = bytearray(file(1).read_bytes())
    data[-3] ^= 1
    file(1).write_bytes(data)
    message = complaint(capsys)
    assert "mode_m_layer_1.npy" in message
    assert "SHA-256" in message
    file(1).write_bytes(data[:-40])
    assert "mode_m_layer_1.npy" in complaint(capsys)
    file(1).unlink()
    assert "is missing" in complaint(capsys)


def test_a_pickle_is_not_run(capsys: Capsys) -> None:
    import hashlib

    standard()
    np.save(file(), np.array([{"a": 1}], dtype=object), allow_pickle=True)
    path, stats_record = edited()
    stats_record["layers"]["layer_0"]["sha256"] = hashlib.sha256(file().read_bytes()).hexdigest()
    path.write_text(json.dumps(stats_record), encoding="utf-8")
    assert "cannot be read" in complaint(capsys)
    np.save(file(), R[0].astype(np.float64))
    stats_record["layers"]["layer_0"]["sha256"] = hashlib.sha256(file().read_bytes()).hexdigest()
    path.write_text(json.dumps(stats_record), encoding="utf-8")
    assert "float64" in complaint(capsys)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weights": "cc" * 32}, "weights"),
        ({"inputs": "cc" * 32}, "inputs"),
        ({"model": "other"}, "'other'"),
    ],
)
def test_captures_of_different_things_are_not_compared(
    change: dict[str, Any], word: str, capsys: Capsys
) -> None:
    both({0: A[0]}, {0: R[0]}, **change)
    message = complaint(capsys)
    assert word in message
    assert "mode m and reference fp32" in message


def test_another_calibration_is_another_thing(capsys: Capsys) -> None:
    dump(replace(OF, mode="one", calibration="aa" * 32), {0: A[0]})
    dump(replace(OF, mode="two", calibration="ab" * 32), {0: A[0]})
    assert "calibration" in complaint(capsys, "one", "--reference", "two")


def test_shapes_and_lengths_have_to_agree(capsys: Capsys) -> None:
    both({0: A[0][:, :5].copy()}, {0: R[0]})
    message = complaint(capsys)
    assert "[12, 5]" in message
    assert "[12, 6]" in message
    dump(replace(OF, mode="m"), {0: A[0]}, split=6)
    assert "tokens [6, 6] and [7, 5]" in complaint(capsys)


def test_a_layer_that_lacks_on_either_side_is_an_error(capsys: Capsys) -> None:
    both({0: A[0]}, {0: R[0], 1: R[1]})
    assert "layers layer_0 and layer_0, layer_1" in complaint(capsys)
    both({0: A[0], 1: A[1]}, {0: R[0]})
    assert "layers layer_0, layer_1 and layer_0" in complaint(capsys)


def test_the_reference_is_the_one_in_the_basis_of_the_mode(capsys: Capsys) -> None:
    both({0: A[0]}, {0: R[0]}, basis="rotated")
    assert "basis 'rotated'" in complaint(capsys)
    dump(replace(OF, basis="rotated"), {0: R[0]})
    comparison = record()
    assert (comparison["reference_mode"], comparison["basis"]) == ("fp32-rotated", "rotated")
    text = capsys.readouterr().out
    assert "reference mode_fp32-rotated_layer_*.npy: fp32 in the basis of the mode" in text
    assert compare("--all") == 0
    assert "Compared with fp32-rotated: m" in capsys.readouterr().out.splitlines()
    dump(replace(OF, mode="plain"), {0: A[0]})
    message = complaint(capsys, "plain", "--reference", "m")
    assert "basis 'plain' and 'rotated'" in message


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda r: r.update(version=2), "version 2"),
        (lambda r: r.update(qgate="sweep"), "layer outputs"),
        (lambda r: r.update(layers={}), "no layer"),
        (lambda r: r["layers"].update(layer_0={}), "layer_0"),
        (lambda r: r["layers"]["layer_0"].update(file="../x.npy"), "x.npy"),
        (lambda r: r["layers"]["layer_0"].update(tokens=[12]), "12 tokens"),
        (lambda r: r["layers"]["layer_0"].update(shape=[12, -6]), "-6"),
        (lambda r: r.update(samples="2"), "samples"),
        (lambda r: r.update(mode="other"), "'other'"),
        (lambda r: r.pop("weights"), "weights"),
        (lambda r: r.update(reference="fp32-rotated"), "'fp32-rotated'"),
        (lambda r: r["layers"]["layer_0"].update(mean=math.nan), "NaN"),
    ],
)
def test_a_stats_file_is_not_believed_blindly(edit: Any, word: str, capsys: Capsys) -> None:
    standard()
    path, stats_record = edited()
    edit(stats_record)
    path.write_text(json.dumps(stats_record), encoding="utf-8")
    message = complaint(capsys)
    assert "mode_m_stats.json" in message
    if word != "layer_0":
        assert word in message


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["n"], "unknown captured mode 'n'"),
        (["m", "--reference", "fp16"], "'fp16'"),
        (["m", "--output-dir", "nowhere"], "nowhere"),
        (["m", "--output-dir", "layer_outputs/mode_m_stats.json"], "is a file; --output-dir"),
        (["m", "--reference", "m"], "reference itself"),
        ([], "MODE"),
        (["m", "--all"], "MODE"),
        (["--all", "--save-comparison", "x.json"], "comparisons"),
    ],
)
def test_bad_questions_are_one_line(argv: list[str], word: str, capsys: Capsys) -> None:
    standard()
    assert main(["layers", "compare", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert word in err


def test_what_a_killed_capture_left_is_no_capture(capsys: Capsys) -> None:
    standard()
    Path("layer_outputs/mode_m_stats.json").unlink()
    assert "'m'" in complaint(capsys)


def test_a_comparison_that_cannot_be_saved_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    standard()
    record()
    old = Path("deep/er/c.json").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert compare("m", "--save-comparison", "deep/er/c.json") == 2
    assert "No space left" in capsys.readouterr().err
    assert [p.name for p in Path("deep/er").iterdir()] == ["c.json"]
    assert Path("deep/er/c.json").read_bytes() == old


# All of them ---------------------------------------------------------------------------------


def test_all_modes_in_one_table_sorted_by_the_last_layer(capsys: Capsys) -> None:
    dump(OF, {0: R[0], 3: R[1]})
    for name, noise in (("loud", 4), ("quiet", 1), ("middle", 2)):
        layers = {0: A[0], 3: R[1] + noise * (A[1] - R[1])}
        dump(replace(OF, mode=name), layers)
    assert compare("--all") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["SUMMARY TABLE - All Modes vs fp32", ""]
    heads = [cell.strip() for cell in lines[2].split("  ") if cell.strip()]
    assert heads == [
        "Mode", "Layer 0 MSE", "Layer 0 MAE", "Last Layer MSE", "Last Layer MAE", "Avg Corr",
        "Grades",
    ]  # fmt: skip
    assert "Compared with fp32: quiet, middle, loud" in lines
    assert [line.split()[0] for line in lines[4:7]] == ["quiet", "middle", "loud"]
    saved = sorted(path.name for path in Path("layer_outputs/comparisons").iterdir())
    assert saved == ["loud_vs_fp32.json", "middle_vs_fp32.json", "quiet_vs_fp32.json"]
    quiet = json.loads(Path("layer_outputs/comparisons/quiet_vs_fp32.json").read_text("utf-8"))
    assert f"{quiet['layers']['layer_3']['mse']:.6e}" in lines[4]


def test_all_fails_if_one_does_or_none_was_there(capsys: Capsys) -> None:
    dump(OF, {0: R[0]})
    assert compare("--all") == 1
    assert "nothing was compared" in capsys.readouterr().err
    odd = R[0].copy()
    odd[1, 1] = math.nan
    dump(replace(OF, mode="odd"), {0: odd})
    dump(replace(OF, mode="fine"), {0: A[0]})
    assert compare("--all") == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[4:6]] == ["fine", "odd"]
    assert "FAILED: layer_0: 1 values of mode odd" in out
    dump(replace(OF, mode="alien", weights="cc" * 32), {0: A[0]})
    assert compare("--all") == 2
    assert "mode alien" in capsys.readouterr().err


@proof
def test_captured_modes_of_a_model_are_compared(capsys: Capsys) -> None:
    assert main(["layers", "capture", "--mode", "0,2-1,2-4,fp16,mxfp8", *SMALL]) == 0
    assert main(["layers", "compare", "2-1"]) == 0
    assert main(["layers", "compare", "2_1", "--reference", "0"]) == 0
    capsys.readouterr()
    assert main(["layers", "compare", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[4:9]} == {"0", "2-1", "2-4", "fp16", "mxfp8"}
    assert lines[4].split()[0] == "fp16"
    # Modes in the other basis have no error against a quantized reference, and are not left out.
    assert main(["layers", "compare", "--all", "--reference", "0"]) == 2
    out, err = capsys.readouterr()
    assert {line.split()[0] for line in out.splitlines()[4:8]} == {"2-1", "2-4", "fp16", "fp32"}
    assert "mxfp8" in err
