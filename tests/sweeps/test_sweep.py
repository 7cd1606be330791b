"""The sweep against direct evaluation of each level, and its advice against the rules."""

from __future__ import annotations

import json
import logging
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qgate
from qgate.errors import QgateError
from qgate.formats import FORMATS, definition
from qgate.scales import levels as _levels
from qgate.stats import block_counts, counts
from qgate.sweeps import advice
from qgate.sweeps.underflow import Watch

ELEMENTS = ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "hif8"]
MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"]


def activation(rows: int = 64, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(torch.randn(256, generator=generator))
    channels[::100] *= 40
    return (torch.randn(rows, 256, generator=generator) * channels).to(dtype)


def brute_force(q: np.ndarray, x: np.ndarray) -> dict[str, float]:
    error = q - x
    mse = float(np.mean(error**2))
    return {
        "sqnr_db": 10 * math.log10(np.sum(x**2) / np.sum(error**2)) if mse else math.inf,
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": float(np.mean(np.abs(error))),
        "max_abs": float(np.abs(error).max()),
        "mean_error": float(np.mean(error)),
        "relative_mse": float(np.sum(error**2) / np.sum(x**2)),
        "relative_mae": float(np.sum(np.abs(error)) / np.sum(np.abs(x))),
        "relative_error": float(100 * np.mean(np.abs(error)) / np.mean(np.abs(x))),
        "cosine": float(np.sum(q * x) / np.sqrt(np.sum(q**2) * np.sum(x**2))) if q.any() else 0.0,
        "correlation": float(np.corrcoef(q.ravel(), x.ravel())[0, 1]) if q.any() else 0.0,
        "psnr_db": 20 * math.log10(np.abs(x).max() / math.sqrt(mse)) if mse else math.inf,
    }


def assert_level(level: dict, q: np.ndarray, x: np.ndarray, scaled: np.ndarray, fmt) -> None:
    expected = brute_force(q, x)
    assert set(level["metrics"]) == set(expected)
    for name, value in expected.items():
        assert level["metrics"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    n = x.size
    places = definition._places(fmt)
    over = np.abs(scaled) > (places[-3] + places[-4]) / 2
    if (len(places) - 4) % 2 or fmt.rounding == "away":  # where a tie leaves the largest value
        over |= np.abs(scaled) == (places[-3] + places[-4]) / 2
    under = (x != 0) & (np.abs(scaled) < fmt.min_normal)
    flush = (x != 0) & (q == 0)
    for name, hits in (("overflow", over), ("underflow", under), ("flush", flush)):
        assert level[name] == int(hits.sum())
        assert level[f"{name}_share"] == hits.sum() / n
    energy = np.sum(x**2)
    assert level["overflow_energy"] == pytest.approx(np.sum((q - x)[over] ** 2) / energy, rel=1e-9)
    assert level["flush_energy"] == pytest.approx(np.sum(x[flush] ** 2) / energy, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_level_is_what_direct_evaluation_gives(name: str, dtype: torch.dtype) -> None:
    x = activation(dtype=dtype)
    values, fmt = x.double().numpy(), FORMATS.get(name)
    swept = qgate.sweep(x, name, levels=4)
    assert len(swept.levels) >= 4
    for level in swept.levels:
        scale = level["factor"]
        assert scale == pytest.approx(2.0 ** level["exponent"], rel=1e-14)
        q = definition.round_by_list(values / scale, fmt) * scale
        assert_level(level, q, values, values / scale, fmt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", MX)
def test_block_offsets_are_what_direct_evaluation_gives(name: str, dtype: torch.dtype) -> None:
    x = activation(8, dtype)
    x[3, 64:96] = 0.0
    fmt = FORMATS.get(name)
    swept = qgate.sweep(x, name, granularity="block")
    codes = qgate.encode(x, name).scales.double().numpy().repeat(32, axis=1) - 127
    values = x.double().numpy()
    for level in swept.levels:
        scale = np.exp2(codes + level["exponent"])
        q = definition.round_by_list(values / scale, fmt.element) * scale
        assert_level(level, q, values, values / scale, fmt.element)
    at_zero = next(level for level in swept.levels if level["exponent"] == 0)
    exact = qgate.quantize(x, name, dtype=torch.float64).numpy()
    assert at_zero["metrics"]["mse"] == pytest.approx(np.mean((exact - values) ** 2), rel=1e-12)
    assert at_zero["marks"] == ["production"]


def test_counts_chunks_and_bf16_numbers_in_float32_give_the_same() -> None:
    x = activation()
    whole = qgate.sweep(x, "e4m3").to_dict()
    for other in (counts(x), counts(x.split(7)), x.float()):
        repeated = qgate.sweep(other, "e4m3").to_dict()
        assert repeated["levels"] == whole["levels"]
        assert repeated["advice"] == whole["advice"]
    blocks = qgate.sweep(x, "mxfp4", granularity="block").to_dict()
    for other in (block_counts(x), x.float()):
        repeated = qgate.sweep(other, "fp4_e2m1", granularity="block").to_dict()
        assert repeated["levels"] == blocks["levels"]


def test_direct_float32_agrees_with_its_own_counts() -> None:
    """A float32 tensor that is not bf16 goes the direct way; rounded first, the counted one."""
    x = activation(dtype=torch.float32) * 1.0001
    rounded = qgate.sweep(x.bfloat16(), "e5m2").levels
    direct = qgate.sweep(x.bfloat16().double(), "e5m2").levels
    for a, b in zip(rounded, direct, strict=True):
        if "amax" in a["marks"]:  # float32 or float64, as the tensor
            continue
        for name in a["metrics"]:
            assert a["metrics"][name] == pytest.approx(b["metrics"][name], rel=1e-9)


# --- which levels --------------------------------------------------------------------------------

positive = st.floats(min_value=2.0**-140, max_value=2.0**127, allow_subnormal=False)


@given(positive, positive)
@settings(max_examples=300)
def test_logarithms_of_ratios_are_exact(a: float, b: float) -> None:
    ratio = Fraction(a) / Fraction(b)
    low, high = _levels.floor_log2_ratio(a, b), _levels.ceil_log2_ratio(a, b)
    assert Fraction(2) ** low <= ratio < Fraction(2) ** (low + 1)
    assert Fraction(2) ** (high - 1) < ratio <= Fraction(2) ** high


@given(st.integers(-100, 100), st.integers(-1, 1))
@settings(max_examples=100)
def test_ends_at_powers_of_two_and_beside_them(k: int, step: int) -> None:
    amax = (
        float(np.nextafter(np.float32(448 * 2.0**k), np.float32(step * np.inf)))
        if step
        else 448 * 2.0**k
    )
    ends = _levels.ends_of(amax, amax / 64, (448.0, 2.0**-6), None, None, "exact")
    assert ends.maximum == k + (step > 0)
    assert amax <= 448 * 2.0**ends.maximum
    assert amax > 448 * 2.0 ** (ends.maximum - 1)
    assert amax / 64 >= 2.0**-6 * 2.0**ends.minimum
    used = _levels.usual_of(FORMATS.get("fp8_e4m3"), amax, mx=True, double=False)
    assert (used.kind, used.exponent) == ("production", math.frexp(amax)[1] - 1 - 8)


def test_default_ends_promise_what_they_say_and_documented_ends_do_not() -> None:
    x = activation()
    swept = qgate.sweep(x, "e4m3")
    by_mark = {mark: level for level in swept.levels for mark in level["marks"]}
    assert by_mark["maximum"]["overflow"] == 0
    assert by_mark["minimum"]["underflow"] == 0
    documented = qgate.sweep(x, "e4m3", alignment="documented").record["parameters"]
    amax, amin = float(x.abs().max()), float(x.abs()[x != 0].min())
    assert documented["max_exp"] == math.floor(math.log2(amax / 448))
    assert documented["min_exp"] == math.ceil(math.log2(amin / 2.0**-6))


def test_levels_hold_even_steps_all_integers_and_the_usual_scale() -> None:
    swept = qgate.sweep(activation(), "e4m3", levels=7, max_exp=2.5, min_exp=-3.25)
    exponents = [level["exponent"] for level in swept.levels]
    assert exponents == sorted(exponents, reverse=True)
    assert set(np.linspace(2.5, -3.25, 7)) <= set(exponents)
    assert {2.0, 1.0, 0.0, -1.0, -2.0, -3.0} <= set(exponents)
    assert float(swept.record["parameters"]["usual"]["exponent"]) in exponents
    for level in swept.levels:
        assert level["integer"] == level["e8m0"] == float(level["exponent"]).is_integer()


def test_scale_bits_limit_what_can_be_recommended() -> None:
    x = activation() * 2.0**18
    assert qgate.sweep(x, "e4m3").exponent > 15
    narrow = qgate.sweep(x, "e4m3", scale_bits=5)
    assert [level["e8m0"] for level in narrow.levels] == [
        level["integer"] and abs(level["exponent"]) <= 15 for level in narrow.levels
    ]
    assert abs(narrow.exponent) <= 15
    assert "a scale of 5 bits" in " ".join(qgate.sweep(x * 2.0**30, "e4m3", scale_bits=5).reasons)


@pytest.mark.parametrize(
    ("fmt", "granularity", "words"),
    [
        (
            "nvfp4",
            "tensor",
            "nvfp4 chooses its own scales, .*; sweep its elements, fp4_e2m1, or leave",
        ),
        ("hif8", "block", "hif8 has no MX format.*mxint8"),
        ("uint4", "tensor", "uint4 has no negative values.*signed format"),
    ],
)
def test_a_format_that_cannot_be_swept_is_refused(fmt: str, granularity: str, words: str) -> None:
    with pytest.raises(QgateError, match=words):
        qgate.sweep(activation(), fmt, granularity=granularity)


def test_the_format_that_is_swept_is_the_one_of_the_granularity() -> None:
    swept = qgate.sweep(activation(), "int8", granularity="block")
    assert swept.record["format"]["name"] == "mxint8"
    assert qgate.sweep(activation(), "mxfp8").record["format"]["name"] == "fp8_e4m3"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"levels": 0}, "levels 0"),
        ({"levels": -1}, "levels -1"),
        ({"levels": 2.5}, "levels 2.5"),
        ({"scale_bits": -5}, "scale_bits -5"),
        ({"scale_bits": 9}, "scale_bits 9"),
        ({"max_exp": -3, "min_exp": 3}, "max_exp -3 is below min_exp 3"),
        ({"max_exp": math.nan}, "max_exp nan"),
        ({"granularity": "row"}, "'row'"),
        ({"alignment": "both"}, "'both'"),
        ({"granularity": "block", "max_exp": 0.5}, "offsets"),
        ({"granularity": "block", "block": 0}, "block 0"),
        ({"granularity": "block", "axis": 2}, "axis 2"),
    ],
)
def test_nonsense_is_refused_in_one_line(options: dict, words: str) -> None:
    with pytest.raises(QgateError) as caught:
        qgate.sweep(activation(), "e4m3", **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.empty(0), "empty"),
        (torch.zeros(5), "all zeros"),
        (torch.full((4, 32), 1e-310, dtype=torch.float64), "no number beyond 1e-310"),
        (torch.full((3,), math.nan), "no finite number: 3 NaN, 0 Inf"),
    ],
)
def test_tensors_without_anything_to_sweep(x: torch.Tensor, words: str) -> None:
    for granularity in ("tensor", "block"):
        with pytest.raises(QgateError, match=words):
            qgate.sweep(x, "e4m3", granularity=granularity)


# --- hard tensors --------------------------------------------------------------------------------


def test_nan_and_inf_fail_and_the_rest_is_measured() -> None:
    x = activation()
    clean = qgate.sweep(x[1:], "e4m3").record
    x[0] = 0.0
    x[0, 0], x[0, 1], x[0, 2] = math.nan, math.inf, -math.inf
    record = qgate.sweep(x, "e4m3").record
    assert record["failed"] == "1 NaN and 2 Inf in the tensor"
    assert clean["failed"] is None
    assert record["tensor"]["nan"] == 1
    assert record["advice"]["recommended"] == clean["advice"]["recommended"]
    mse = record["levels"][0]["metrics"]["mse"]
    assert mse == pytest.approx(clean["levels"][0]["metrics"]["mse"] * (63 * 256) / (64 * 256 - 3))
    blocks = qgate.sweep(x, "mxfp8", granularity="block").record
    assert blocks["failed"]
    assert blocks["tensor"]["poisoned"] == 32


@pytest.mark.parametrize(
    "x",
    [
        torch.full((100,), 3.0),
        torch.exp2(torch.arange(-5.0, 5.0)),
        torch.tensor(3.0),
        activation(2).float() * 2.0**-120,
        torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e30,
        activation(2, torch.float64) * 1e200,
        activation(2, torch.float64) * 1e-200,
        -activation(2).abs(),
        torch.tensor([2.0**-149, 2.0**-140]),
    ],
    ids=[
        "constant",
        "powers",
        "0-d",
        "tiny",
        "huge",
        "fp64-huge",
        "fp64-tiny",
        "negative",
        "subnormal",
    ],
)
@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_hard_tensors_get_a_sound_recommendation(x: torch.Tensor, granularity: str) -> None:
    swept = qgate.sweep(x, "fp8_e4m3", granularity=granularity)
    chosen = swept.recommended
    if not 2.0**-130 < float(x.abs().max()) < 1e100:
        # No E8M0 scale reaches such numbers: the sweep has to say how bad that is, in numbers.
        assert 0 <= chosen["metrics"]["cosine"] < 0.5
        assert abs(chosen["exponent"]) <= 127
        json.dumps(swept.to_dict(), allow_nan=False)
        return
    assert math.isfinite(chosen["score"])
    assert chosen["integer"] or "amax" in chosen["marks"]
    assert 0.9 <= chosen["metrics"]["cosine"] <= 1.0
    assert chosen["metrics"]["sqnr_db"] > 20
    assert not math.isnan(chosen["metrics"]["psnr_db"])
    integers = [level for level in swept.levels if level["integer"]]
    best = max(level["metrics"]["sqnr_db"] for level in integers)
    assert best - chosen["metrics"]["sqnr_db"] < 1 or best == math.inf
    json.dumps(swept.to_dict(), allow_nan=False)


def test_parameters_that_require_gradients_are_swept_like_their_values() -> None:
    x = activation(8).float()
    swept = qgate.sweep(torch.nn.Parameter(x), "e4m3", max_exp=-5, min_exp=-10)
    assert (
        swept.record["levels"] == qgate.sweep(x, "e4m3", max_exp=-5, min_exp=-10).record["levels"]
    )
    assert next(level for level in swept.levels if level["exponent"] == -5)["overflow"] > 0


# --- advice --------------------------------------------------------------------------------------


def test_normalization_of_constant_and_infinite_metrics() -> None:
    assert advice.normalized([3.0, 1.0, 2.0], lower=True) == [0.0, 1.0, 0.5]
    assert advice.normalized([3.0, 1.0, 2.0], lower=False) == [1.0, 0.0, 0.5]
    assert advice.normalized([5.0, 5.0], lower=True) == [1.0, 1.0]
    assert advice.normalized([math.inf, 1.0, 3.0], lower=False) == [1.0, 0.0, 1.0]
    assert advice.normalized([math.inf, math.inf], lower=False) == [1.0, 1.0]
    assert advice.normalized([math.nan, 1.0], lower=False)[0] == 0.0


def test_the_score_is_the_documented_sum() -> None:
    x = activation(dtype=torch.float64)
    swept = qgate.sweep(x, "e4m3", levels=6)
    part = {name: [level["metrics"][name] for level in swept.levels] for name in advice.WEIGHTS}
    total = 0.3 * np.asarray(part["cosine"])
    for name, weight in (("mse", 0.3), ("mae", 0.1), ("relative_error", 0.1)):
        v = np.asarray(part[name])
        total += weight * (1 - (v - v.min()) / (v.max() - v.min()))
    v = np.asarray(part["psnr_db"])
    total += 0.2 * (v - v.min()) / (v.max() - v.min())
    scores = [level["score"] for level in swept.levels]
    assert scores == pytest.approx(total.tolist(), rel=1e-12)
    assert qgate.sweep(x * 2.0**-30, "e4m3", levels=6).exponent == swept.exponent - 30


def test_severity_has_the_documented_edges() -> None:
    assert [advice.severity(s) for s in (0.0, 0.00099, 0.001, 0.01, 0.0101)] == [
        "none", "none", "moderate", "moderate", "high",
    ]  # fmt: skip


def test_levels_with_high_overflow_are_not_recommended_while_others_exist() -> None:
    x = activation()
    swept = qgate.sweep(x, "e4m3", max_exp=-1, min_exp=-30)
    assert swept.recommended["severity"]["overflow"] != "high"
    all_over = qgate.sweep(x, "e4m3", max_exp=-14, min_exp=-20)
    usable = [level for level in all_over.levels if "amax" not in level["marks"]]
    assert all(level["severity"]["overflow"] == "high" for level in usable)


def test_a_block_offset_is_not_left_out_for_saturating_by_design() -> None:
    """FP4's floor rule saturates what is from 1.75 to 2 times its block's power of two."""
    x = torch.rand(256, 256, generator=torch.Generator().manual_seed(3)).bfloat16() * 0.925
    swept = qgate.sweep(x, "mxfp4", granularity="block")
    production = next(level for level in swept.levels if "production" in level["marks"])
    assert production["severity"]["overflow"] == "high"
    assert production["overflow_energy"] < 0.01
    best = max(level["metrics"]["sqnr_db"] for level in swept.levels)
    assert swept.recommended["metrics"]["sqnr_db"] == best


def test_exact_offsets_stay_with_production() -> None:
    swept = qgate.sweep(torch.exp2(torch.arange(0.0, 5.0)), "mxfp8", granularity="block")
    assert swept.exponent == 0
    assert "Every value is represented exactly." in swept.reasons


def test_when_everything_overflows_the_least_problematic_level_is_recommended() -> None:
    levels = [
        {
            "exponent": float(-i),
            "integer": True,
            "e8m0": True,
            "marks": [],
            "metrics": dict.fromkeys((*advice.WEIGHTS, "sqnr_db"), 1.0 + i),
            "overflow": 10 * i + 10,
            "overflow_share": 0.05 + 0.1 * i,
            "overflow_energy": 0.5,
            "underflow_share": 0.0,
            "flush": 0,
            "flush_share": 0.0,
            "flush_energy": 0.0,
            "severity": {"overflow": "high", "underflow": "none", "flush": "none"},
            "significant": True,
        }
        for i in range(3)
    ]
    advised = advice.advise(levels, block=False)
    assert advised["recommended"] == advised["least_problematic"] == 0
    assert advised["candidates"] == "all levels overflow: least problematic"
    assert advised["clean_range"] is None
    assert any("loses the least" in reason for reason in advised["reasons"])


def test_a_sweep_is_plain_data(tmp_path) -> None:
    swept = qgate.sweep(torch.full((64,), 2.0), "e4m3", name="constant")
    data = json.loads(json.dumps(swept.to_dict(), allow_nan=False))
    assert data["levels"][0]["metrics"]["sqnr_db"] == "inf"
    assert data["tensor"]["shape"] == [64]
    frame = swept.to_frame()
    assert len(frame) == len(swept.levels)
    assert {"exponent", "sqnr_db", "overflow_share", "overflow_severity"} <= set(frame.columns)
    assert frame["mse"].iloc[0] == 0.0
    frame.to_csv(tmp_path / "x.csv")


# --- underflow -----------------------------------------------------------------------------------


def test_range_counts_before_rounding() -> None:
    x = torch.tensor([1.0, 2.0**-7, 2.0**-9, 2.0**-11, 0.0, -(2.0**-8)])
    counted = qgate.analysis.range(x, "e4m3")
    assert (counted.underflow, counted.flushed, counted.elements) == (4, 1, 6)
    assert counted.severity == "high"
    assert "4 of 6" in str(counted)
    assert counted.to_dict()["underflow_share"] == 4 / 6
    assert qgate.analysis.range(torch.ones(5), "e4m3").severity == "none"
    moderate = torch.ones(1000)
    moderate[:5] = 2.0**-8
    assert qgate.analysis.range(moderate, "e4m3").severity == "moderate"


def test_range_is_about_the_scaled_tensor() -> None:
    x = activation(8) * 2.0**-20
    assert qgate.analysis.range(x, "e4m3").underflow_share > 0.9
    assert qgate.analysis.range(x, "e4m3", granularity="tensor").underflow_share < 0.05
    assert qgate.analysis.range(x, "mxfp8").underflow_share < 0.05


def test_watching_speaks_once_per_site_and_changes_nothing(caplog) -> None:
    x = torch.ones(64) * 2.0**-8
    fine = torch.ones(64)
    expected = qgate.quantize(x, "e4m3")
    with caplog.at_level(logging.WARNING, logger="qgate"), qgate.watch_underflow() as watch:
        for _ in range(3):
            y = qgate.quantize(x, "e4m3")
        z = qgate.quantize(x, "e4m3")
        qgate.quantize(fine, "e4m3")
    assert torch.equal(y, expected)
    assert torch.equal(z, expected)
    assert len(watch.findings) == 2
    assert len(caplog.records) == 2
    assert all(__file__ in site for site, _ in watch.findings)
    assert "HIGH" in caplog.records[0].getMessage()
    qgate.quantize(x, "e4m3")
    assert len(caplog.records) == 2


def test_watching_keeps_gradients_and_takes_a_callback() -> None:
    warnings: list[str] = []
    x = (torch.ones(1000) * 1.5).requires_grad_()
    small = torch.ones(1000)
    small[:5] = 2.0**-8
    with qgate.watch_underflow(warnings.append):
        y = qgate.quantize(x * small, "e4m3")
    y.sum().backward()
    assert x.grad is not None
    assert len(warnings) == 1
    assert "MODERATE" in warnings[0]


def test_a_site_keeps_its_worst_tensor_and_sites_of_processes_add_up() -> None:
    x = torch.ones(64)
    some, all_of_it = x.clone(), x * 2.0**-12
    some[:1] = 2.0**-8

    def watched(*tensors: torch.Tensor) -> Watch:
        with qgate.watch_underflow(lambda _: None) as watch:
            for tensor in tensors:
                qgate.quantize(tensor, "e4m3")
        return watch

    watch, other = watched(some, all_of_it, x), watched(x, some)
    for site in other.sites.values():
        watch.add(type(site).from_dict(json.loads(json.dumps(site.to_dict()))))
    (site,) = watch.sites.values()
    assert (site.tensors, site.lossy) == (5, 3)
    assert (site.worst.underflow, site.worst.flushed) == (64, 64)
    assert watch.lines()[1].endswith("3 of 5 tensors")
    assert "at most" not in watch.lines()[0]


def test_losses_below_a_thousandth_are_told_as_what_they_are() -> None:
    x = torch.ones(10_000)
    x[:5] = 2.0**-12
    with qgate.watch_underflow() as watch:
        qgate.quantize(x, "e4m3")
    assert watch.findings == {}
    assert "at most 0.05% of a tensor is below" in watch.lines()[0]


# --- the scale that a block really gets ----------------------------------------------------------


def test_offsets_beyond_the_scales_there_are_do_not_help_and_are_not_recommended() -> None:
    x = (torch.randn(2**12, generator=torch.Generator().manual_seed(0)) * 2.0**-128).bfloat16()
    swept = qgate.sweep(x, "fp4_e2m1", granularity="block")
    at = {level["exponent"]: level for level in swept.levels}
    assert at[-2.0]["metrics"] == at[0.0]["metrics"]
    assert not at[-2.0]["e8m0"]
    assert swept.exponent >= 0


def test_narrow_block_scales_are_nan_where_the_quantizer_says_so() -> None:
    x = torch.randn(2**10, generator=torch.Generator().manual_seed(0)) * 2.0**14
    swept = qgate.sweep(x, "mxfp8", granularity="block", scale_bits=3)
    assert qgate.quantize(x, "mxfp8", scale_bits=3).isnan().any()
    zero = next(level for level in swept.levels if level["exponent"] == 0)
    assert math.isnan(zero["metrics"]["sqnr_db"])
    assert not zero["e8m0"]


def test_one_given_end_moves_the_other_only_where_it_has_to() -> None:
    x = activation()
    free = qgate.sweep(x, "e4m3").record["parameters"]
    low = qgate.sweep(x, "e4m3", max_exp=-60).record["parameters"]
    assert (low["max_exp"], low["min_exp"], low["alignment"]) == (-60, -60, "maximum given")
    high = qgate.sweep(x, "e4m3", max_exp=10).record["parameters"]
    assert (high["max_exp"], high["min_exp"]) == (10, free["min_exp"])
    assert qgate.sweep(x, "e4m3", min_exp=-30).record["parameters"]["alignment"] == "minimum given"


def test_what_is_no_format_or_tensor_is_named() -> None:
    with pytest.raises(TypeError, match="not NoneType"):
        qgate.sweep(activation(), None)  # type: ignore[arg-type]
    with pytest.raises(QgateError, match="an iterator does not allow"):
        qgate.stats.counts(iter([torch.zeros(3)]))
    assert "recommended" in repr(qgate.sweep(activation(), "e4m3"))
