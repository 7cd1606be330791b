"""Which scale suits a tensor, against brute force: every power of two within 2^±40 of amax.

The oracle knows the values of a format from libraries that were written elsewhere, and measures the
distance to the nearest one: no rounding rule, no counts, no sums of ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch

import qgate
from qgate.errors import QgateError
from qgate.formats import FORMATS
from qgate.scales import search as _search
from qgate.sweeps import advice
from qgate.sweeps import compute as sweeping
from qgate.sweeps import formats as sweep_formats
from qgate.sweeps.record import SweepView, SweptLevel
from qgate.sweeps.texts import lines
from tests.shares import share

Floats = np.ndarray


def _decoded(dtype: type, bits: int = 8) -> Floats:
    codes = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        values = np.abs(codes.view(dtype).astype(np.float64))
    return np.unique(values[np.isfinite(values)])


VALUES: dict[str, Callable[[], Floats]] = {
    "fp8_e4m3": lambda: _decoded(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": lambda: _decoded(ml_dtypes.float8_e5m2),
    "fp8_e4m3fnuz": lambda: _decoded(ml_dtypes.float8_e4m3fnuz),
    "fp8_e5m2fnuz": lambda: _decoded(ml_dtypes.float8_e5m2fnuz),
    "fp8_e4m3b11fnuz": lambda: _decoded(ml_dtypes.float8_e4m3b11fnuz),
    "fp6_e3m2": lambda: _decoded(ml_dtypes.float6_e3m2fn, 6),
    "fp6_e2m3": lambda: _decoded(ml_dtypes.float6_e2m3fn, 6),
    "fp4_e2m1": lambda: _decoded(ml_dtypes.float4_e2m1fn, 4),
    "hif8": lambda: _decoded(en_dtypes.hifloat8),
    "int8": lambda: np.arange(128.0),
    "int4": lambda: np.arange(8.0),
    "int2": lambda: np.arange(2.0),
    "fp16": lambda: _decoded(np.float16, 16),
    "bf16": lambda: _decoded(ml_dtypes.bfloat16, 16),
    "mxint8": lambda: np.arange(128.0) / 64,
}
SWEPT = [*VALUES, "mxfp8_e4m3", "mxfp4_e2m1"]


@functools.cache
def values_of(name: str) -> Floats:
    element = {"mxfp8_e4m3": "fp8_e4m3", "mxfp4_e2m1": "fp4_e2m1"}.get(name, name)
    return VALUES[element]()


def _zoo() -> dict[str, Floats]:
    random = np.random.default_rng(0)
    normal = random.standard_normal(2**11)
    channel = random.standard_normal((64, 32))
    outliers, massive = normal.copy(), normal.copy()
    outliers[::97] *= 1000
    massive[7] = 3e4
    loud, louder = channel.copy(), channel.copy()
    loud[:, 5] *= 60
    louder[:, 5] *= 1000
    coarse = qgate.quantize(torch.from_numpy(normal), "fp8_e4m3").numpy()
    return {
        "gaussian": normal,
        "gaussian 1e-6": normal * 1e-6,
        "gaussian 1e-30": normal * 1e-30,
        "gaussian to 1e37": normal / np.abs(normal).max() * 1e37,
        "t with 3 degrees": random.standard_t(3, 2**11),
        "t with 2 degrees": random.standard_t(2, 2**11),
        "cauchy": random.standard_cauchy(2**11),
        "log-normal": np.exp(2 * normal),
        "fifth power": normal**5,
        "laplace": random.laplace(size=2**11),
        "outlier channel": loud,
        "outlier channel x1000": louder,
        "log-normal channels": channel * np.exp(random.standard_normal(32)),
        "outliers x1000": outliers,
        "massive": massive,
        "uniform": random.uniform(-1, 1, 2**11),
        "positive": random.uniform(0, 1, 2**11),
        "half normal": np.maximum(normal, 0),
        "sparse": np.where(random.uniform(size=2**11) < 0.95, 0.0, normal),
        "constant": np.full(512, 0.3),
        "constant power": np.full(512, 2.0),
        "one value": np.array([3.7]),
        "integers": random.integers(-100, 101, 2**11).astype(np.float64),
        "large integers": random.integers(-3000, 3001, 2**11).astype(np.float64),
        "in e4m3 already": coarse,
        "in int8 already": qgate.quantize(torch.from_numpy(normal * 5), "int8").numpy(),
    }


ZOO = _zoo()
CASES = [(name, torch.bfloat16) for name in ZOO]
CASES += [(name, torch.float32) for name in list(ZOO)[::3]]


def nearest_error(sizes: Floats, values: Floats) -> Floats:
    index = np.searchsorted(values, sizes).clip(1, len(values) - 1)
    return np.minimum(np.abs(sizes - values[index - 1]), np.abs(sizes - values[index]))


def brute_force(x: torch.Tensor, name: str) -> dict[int, float]:
    """Mean squared errors at the powers of two near amax and at 2^0, in units of a power of two."""
    sizes = x.double().abs().numpy().ravel()
    middle = math.frexp(sizes.max())[1] - 1
    unit = np.ldexp(sizes, -middle)

    def error(k: int) -> float:
        wrong = nearest_error(np.ldexp(unit, -k), values_of(name))
        return float(np.mean(np.ldexp(wrong, k) ** 2))

    near = {middle + k for k in range(-40, 41) if abs(middle + k) <= 127} | {0}
    return {exponent: error(exponent - middle) for exponent in near}


def error_at(x: torch.Tensor, name: str, level: SweptLevel) -> float:
    """Mean squared error at the scale of a level, in the units of `brute_force`."""
    sizes = x.double().abs().numpy().ravel()
    unit = 2.0 ** (math.frexp(sizes.max())[1] - 1)
    scale = level["factor"] / unit
    return float(np.mean((nearest_error(sizes / unit / scale, values_of(name)) * scale) ** 2))


def decibels(more: float, least: float) -> float:
    if more <= least * (1 + 1e-9):
        return 0.0
    return 10 * math.log10(more / least) if least > 0 else math.inf


def test_the_zoo_and_the_formats_are_all_there() -> None:
    assert len(ZOO) >= 20
    names = {fmt.name for fmt in FORMATS if sweep_formats._is_swept(fmt)}
    elements = {sweeping.element_of(name).name for name in names}
    assert elements == {sweeping.element_of(name).name for name in SWEPT}


@share(12)
@pytest.mark.parametrize(
    ("name", "dtype"), CASES, ids=lambda each: str(each).removeprefix("torch.")
)
def test_advice_holds_against_brute_force(name: str, dtype: torch.dtype) -> None:
    x = torch.from_numpy(ZOO[name]).to(dtype)
    for fmt in SWEPT:
        errors = brute_force(x, fmt)
        least = min(errors.values())
        swept = qgate.sweep(x, fmt)
        levels = {int(lv["exponent"]): lv for lv in swept.levels if lv["e8m0"]}
        cost = min(decibels(errors[e], least) for e in levels if e in errors)
        assert cost <= 0.1, (fmt, "the best power of two is no level")
        chosen = error_at(x, fmt, swept.recommended)
        usual = [error_at(x, fmt, lv) for lv in swept.levels if "amax" in lv["marks"]]
        if "amax" in swept.recommended["marks"] and not swept.recommended["integer"]:
            assert decibels(least, chosen) > 1, fmt
            least = min(least, chosen)
        elif usual:
            assert decibels(chosen, min(usual[0], chosen)) <= 1, fmt
        cost = decibels(chosen, least)
        mse_cost = swept.record["advice"]["mse_cost_db"]
        assert mse_cost == pytest.approx(cost, abs=1e-6), fmt
        if fmt in ("hif8", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"):
            assert cost <= 0.1, (fmt, swept.exponent)
        advice_lines = [
            line for line in lines(swept.to_dict()) if "RECOMMENDED Scaling Factor" in line
        ]
        assert ("the best MSE" in advice_lines[0]) == (cost > 0.1), fmt


@pytest.mark.parametrize("name", ["gaussian", "uniform", "constant", "constant power", "integers"])
def test_of_equal_levels_the_one_nearest_the_usual_scale_is_advised(name: str) -> None:
    x = torch.from_numpy(ZOO[name]).bfloat16()
    amax = float(x.double().abs().max())
    ties = 0
    for fmt in SWEPT:
        swept = qgate.sweep(x, fmt)
        usual = swept.record["parameters"]["usual"]
        exponents = {"cast": 0.0, "amax": math.log2(float(np.float32(amax / values_of(fmt)[-1])))}
        if usual["kind"] in exponents:
            assert usual["exponent"] == pytest.approx(exponents[usual["kind"]], abs=1e-12)
        else:
            assert fmt.startswith("mx")
            emax = math.frexp(values_of(fmt)[-1])[1] - 1
            assert usual["exponent"] == math.frexp(amax)[1] - 1 - emax
        if "amax" in swept.recommended["marks"]:
            ties += 1
            continue
        errors = brute_force(x, fmt)
        chosen = errors[int(swept.exponent)]
        same = [
            e for e, error in errors.items() if error == pytest.approx(chosen, rel=1e-12, abs=0)
        ]
        candidates = {int(lv["exponent"]) for lv in swept.levels if lv["e8m0"]}
        best = min(same, key=lambda e: abs(e - usual["exponent"]))
        assert best in candidates
        assert abs(swept.exponent - usual["exponent"]) <= abs(best - usual["exponent"]) + 1e-9
        ties += len(same) > 1
    assert ties > 0


@share(3)
@pytest.mark.parametrize("seed", range(3))
def test_hif8_is_advised_where_its_values_are_dense(seed: int) -> None:
    """An outlier channel and a heavy tail: 13 dB were lost at the end of the range."""
    random = np.random.default_rng(seed)
    channel = random.standard_normal((256, 256))
    channel[:, 7] *= 100
    for x in (channel, random.standard_t(2, (256, 256)) * 10):
        tensor = torch.from_numpy(x).bfloat16()
        swept, errors = qgate.sweep(tensor, "hif8"), brute_force(tensor, "hif8")
        assert decibels(errors[int(swept.exponent)], min(errors.values())) <= 0.1
        at_the_end = int(swept.record["parameters"]["max_exp"])
        assert decibels(errors[at_the_end], min(errors.values())) > 6
        assert swept.recommended["metrics"]["sqnr_db"] > 29


def test_the_usual_scale_is_what_quantize_uses() -> None:
    x = torch.from_numpy(ZOO["t with 3 degrees"]).bfloat16()
    exact = x.double()
    for fmt, options in {
        "int8": {},
        "int4": {},
        "fp8_e4m3": {"granularity": "tensor"},
        "fp8_e5m2": {"granularity": "tensor"},
        "hif8": {},
        "fp16": {},
    }.items():
        record = qgate.sweep(x, fmt).record
        kind = record["parameters"]["usual"]["kind"]
        level = next(lv for lv in record["levels"] if kind in lv["marks"])
        q = qgate.quantize(x, fmt, dtype=torch.float64, **options)  # type: ignore[arg-type]
        wrong = float(((q - exact) ** 2).mean())
        assert level["metrics"]["mse"] == pytest.approx(wrong, rel=1e-9, abs=0)
        best = record["levels"][record["advice"]["recommended"]]["metrics"]["sqnr_db"]
        gap = record["advice"]["usual_gap_db"]
        sqnr = level["metrics"]["sqnr_db"]
        assert gap == 0 if best == sqnr else gap == pytest.approx(best - sqnr, abs=1e-9)


@pytest.mark.parametrize("value", [2.0, 3.0, -0.5, 1.25])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2", "fp16", "bf16", "mxfp8_e4m3"])
def test_a_constant_that_is_exact_everywhere_does_not_vary(fmt: str, value: float) -> None:
    swept = qgate.sweep(torch.full((64,), value), fmt)
    assert all(lv["metrics"]["mse"] == 0 for lv in swept.levels if lv["integer"])
    text = "\n".join(lines(swept.to_dict()))
    assert "MSE varies significantly" not in text
    assert "MSE is stable" in text


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_amax_over_max_is_advised_where_powers_of_two_lose(fmt: str) -> None:
    """Values that a scale of amax / max made: powers of two lost 51.4 dB, and were advised."""
    normal = torch.from_numpy(ZOO["gaussian"]).float()
    x = qgate.quantize(normal, fmt, granularity="tensor")
    swept = qgate.sweep(x, fmt)
    powers = [lv["metrics"]["sqnr_db"] for lv in swept.levels if lv["e8m0"]]
    usual = next(lv for lv in swept.levels if "amax" in lv["marks"])
    assert usual["metrics"]["sqnr_db"] > max(powers) + 50
    assert swept.recommended == usual
    gap = usual["metrics"]["sqnr_db"] - max(powers)
    lost = ": not exact." if gap == math.inf else f"{gap:.2f} dB lower."
    assert swept.reasons[-1].startswith("Of powers of two, which scales in E8M0 are, use 2^")
    assert swept.reasons[-1].endswith(lost)
    power = swept.levels[swept.record["advice"]["power"]]["exponent"]
    assert power == int(power), "gates hold powers of two"
    assert f"use 2^{power:g}: " in swept.reasons[-1]
    text = "\n".join(lines(swept.to_dict()))
    assert "amax / max, not an E8M0 scale" in text
    assert "No level of this sweep" not in text
    few = qgate.sweep(x, fmt, scale_bits=6)
    assert few.recommended["e8m0"], "a scale of 6 bits is an exponent"
    as_blocks = qgate.sweep(x, "mxfp8_e4m3" if fmt == "fp8_e4m3" else "mxint8")
    assert as_blocks.recommended["e8m0"], "scales of MX formats are exponents"


def test_a_power_of_two_is_advised_where_amax_over_max_loses() -> None:
    x = torch.from_numpy(ZOO["integers"]).float() * 0.5
    x[0] = 60.0  # amax / 127 is no power of two, and 2^-1 has every value
    swept = qgate.sweep(x, "int8")
    assert (swept.exponent, swept.recommended["metrics"]["sqnr_db"]) == (-1.0, math.inf)


def test_a_level_between_is_not_recommended_and_a_given_end_is_kept() -> None:
    x = torch.from_numpy(ZOO["outlier channel"]).bfloat16()
    for ends in ({"max_exp": -3.0}, {"min_exp": -2.0}, {"max_exp": 1.0, "min_exp": -2.0}):
        swept = qgate.sweep(x, "hif8", **ends)  # type: ignore[arg-type]
        beyond = [lv["exponent"] for lv in swept.levels if "cast" not in lv["marks"]]
        assert max(beyond) <= ends.get("max_exp", math.inf)
        assert min(beyond) >= ends.get("min_exp", -math.inf)
        assert swept.recommended["integer"]


def test_a_search_over_neighbors_finds_what_the_whole_search_finds() -> None:
    for name, x in ZOO.items():
        rounded = torch.from_numpy(x).bfloat16().double().abs().numpy()
        sizes, often = np.unique(rounded, return_counts=True)
        for fmt in ("hif8", "fp8_e4m3", "fp4_e2m1", "fp16"):
            element, weights = FORMATS.get(fmt), often.astype(np.float64)
            few = _search.quick_best_exponent(element, sizes, weights, 0)
            errors = brute_force(torch.from_numpy(x).bfloat16(), fmt)
            if few in errors:
                assert decibels(errors[few], min(errors.values())) <= 0.01, (name, fmt)


def test_the_composite_says_what_it_costs() -> None:
    """A heavy tail: the score prefers a small mean error to the best squared one."""
    examples = 0
    for name in ("t with 2 degrees", "cauchy", "log-normal", "in int8 already"):
        for fmt in ("int8", "int4", "fp4_e2m1", "fp6_e2m3"):
            swept = qgate.sweep(torch.from_numpy(ZOO[name]).bfloat16(), fmt)
            cost = swept.record["advice"]["mse_cost_db"]
            cost_text = f"loses {cost:.2f} dB against the level with the best MSE"
            assert any(cost_text in reason for reason in swept.reasons) == (cost > advice.COSTLY_DB)
            if cost > advice.COSTLY_DB:
                finest = swept.levels[swept.record["advice"]["best_mse"]]
                words = f"{cost:.2f} dB more than the best MSE, at 2^{finest['exponent']:g}"
                assert SweepView(swept.to_dict()).mse_cost == words
                examples += 1
    assert examples, "an example is needed"


def test_names_of_formats_that_cannot_be_swept_are_not_offered() -> None:
    with pytest.raises(QgateError, match="Allowed: ") as caught:
        qgate.sweep(torch.ones(3), "fp9")
    assert not {"nvfp4", "hif4", "uint8"} & set(str(caught.value).replace(".", ",").split(", "))
