"""Pools and summaries against numpy, torch and direct evaluation by the formats."""

from __future__ import annotations

import functools
import json
import math
import operator
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate import formats
from qgate.errors import QgateError
from qgate.formats import ElementFormat
from qgate.summaries import pool as _pool
from qgate.summaries.outcomes import edges_of
from qgate.summaries.pool import Pool, Pooling
from qgate.summaries.pooling import channels_of, pool_of, pool_of_counts, pool_of_statistics

ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "hif8", "fp16", "bf16", "fp4_e2m1")
SCALED = ("mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "hif4", "int8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = ("tensors", "elements", "nan", "posinf", "neginf", "vanished", "low", "high", "least")


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sample(dtype: torch.dtype, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape, generator=generator, dtype=torch.float64) ** 3 * scale
    return wide.to(dtype)


def flat(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float64).numpy().ravel()


def past_the_largest(values: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Where magnitudes are nearer to the place after the largest value than to that one."""
    step = {"fp8_e4m3": 32, "fp8_e5m2": 2**13, "hif8": 2**14, "fp16": 32, "bf16": 2.0**120,
            "fp4_e2m1": 2}[fmt.name]  # fmt: skip
    tie_stays = fmt.name == "fp8_e4m3"
    half = np.abs(values) - fmt.max
    return (half > step / 2) | ((half == step / 2) & (not tie_stays))


def seen(x: torch.Tensor) -> torch.Tensor:
    """The values as they are counted."""
    return x if x.dtype == torch.float16 else x.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [*DTYPES, *NARROW], ids=str)
def test_numbers_of_a_summary_are_those_of_numpy(dtype):
    x = sample(dtype, 40, 64)
    got, values = pool_of(x).summary(), flat(x)
    counted = np.sort(flat(seen(x)))
    assert got["source"] == "values"
    assert got["counted_as"] == ("float16" if dtype == torch.float16 else "bfloat16")
    assert (got["tensors"], got["elements"], got["counted"]) == (1, 2560, 2560)
    assert (got["min"], got["max"]) == (values.min(), values.max())
    assert got["amax"] == np.abs(values).max()
    assert got["amin"] == np.abs(values[values != 0]).min()
    assert got["zeros"] == (values == 0).sum()
    assert got["mean"] == pytest.approx(values.mean(), rel=1e-12, abs=1e-12)
    assert got["std"] == pytest.approx(values.std(), rel=1e-12)
    assert got["rms"] == pytest.approx(math.sqrt((values**2).mean()), rel=1e-12)
    assert got["skew"] == pytest.approx(scipy.stats.skew(counted), rel=1e-9)
    assert got["kurtosis"] == pytest.approx(scipy.stats.kurtosis(counted), rel=1e-9)
    for p, value in got["quantiles"].items():
        at = np.quantile(counted, float(p)) if 0 < float(p) < 1 else np.quantile(values, float(p))
        assert value == pytest.approx(at, rel=1e-12), p
    exponents = np.frexp(counted[counted != 0])[1] - 1
    binades = got["binades"]
    assert binades["first"] == exponents.min()
    assert binades["counts"] == np.bincount(exponents - exponents.min()).tolist()


def test_usage_of_bf16():
    x = sample(torch.bfloat16, 5000)
    got = pool_of(x).summary()["usage"]
    bits = x.view(torch.int16).numpy().view(np.uint16)
    fields = np.unique((bits >> 7) & 0xFF, return_counts=True)[1]
    assert got["patterns"] == len(np.unique(bits))
    assert got["exponents"] == len(fields)
    assert got["exponent_bits"] == pytest.approx(scipy.stats.entropy(fields, base=2))
    assert "usage" not in pool_of(x.to(torch.float16)).summary()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ELEMENTS)
def test_element_formats_by_direct_evaluation(name, dtype):
    x = sample(dtype, 64, 96, scale=30.0)
    x.view(-1)[:5] = torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-39], dtype=torch.float64).to(dtype)
    got = pool_of(x, [name]).summary()["formats"][name]
    fmt, counted = formats.get(name), seen(x)
    n, sizes, values = x.numel(), counted.double().abs(), flat(counted)
    cast = flat(formats.quantize(counted.double(), name))
    finite = x.isfinite().sum().item()
    beyond = past_the_largest(values, fmt) & flat(x.isfinite()).astype(bool)
    assert got["upper"] == (beyond & (values > 0)).sum() / finite
    assert got["lower"] == (beyond & (values < 0)).sum() / finite
    assert got["beyond_range"] == (np.abs(values) > fmt.max).sum() / n
    assert got["underflow"] == ((sizes > 0) & (sizes < fmt.min_normal)).sum() / finite
    assert got["flushed"] == ((cast == 0) & (values != 0)).sum() / finite
    exact = flat(x)[np.isfinite(flat(x))]
    wrong = flat(formats.quantize(torch.from_numpy(exact), name)) - exact
    lost = (wrong[past_the_largest(exact, fmt)] ** 2).sum() / ((wrong**2).sum() or 1.0)
    assert got["saturated_error_share"] == pytest.approx(lost, rel=1e-12)
    assert got["of"] == n
    assert got["signal"] == pytest.approx((exact**2).sum(), rel=1e-12)
    assert got["noise"] == pytest.approx((wrong**2).sum(), rel=1e-12)
    assert got["fitted_signal"] == got["signal"]
    least = min(noise_at(name, exact, k) for k in {0, *nearby(exact)})
    assert least <= got["fitted_noise"] * (1 + 1e-12)
    assert got["fitted_noise"] <= least * 10**0.01


def nearby(values: np.ndarray) -> range:
    middle = math.frexp(float(np.abs(values).max()))[1] - 1
    return range(middle - 40, middle + 41)


def noise_at(name: str, values: np.ndarray, k: int) -> float:
    rounded = np.ldexp(flat(formats.quantize(torch.from_numpy(np.ldexp(values, -k)), name)), k)
    return float(((rounded - values) ** 2).sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ELEMENTS)
def test_the_fitted_power_of_two_is_the_best_of_all(name, seed):
    """Also where it fills no range: an outlier channel and heavy tails in HiF8, clipped FP4."""
    generator = np.random.default_rng(seed)
    channel = generator.standard_normal((64, 64))
    channel[:, 5] *= 60
    for x in (channel, generator.standard_t(2, (64, 64)), generator.uniform(-3e-5, 3e-5, (64, 64))):
        values = torch.from_numpy(x).bfloat16()
        got = pool_of(values, [name]).summary()["formats"][name]
        exact = flat(values)
        least = min(noise_at(name, exact, k) for k in nearby(exact))
        assert got["fitted_noise"] <= least * (1 + 1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_formats_by_direct_evaluation(name, dtype):
    x = sample(dtype, 32, 100)
    got = pool_of(x, [name]).summary()["formats"][name]
    effects = formats.report(x, name)
    assert got["upper"] + got["lower"] == pytest.approx(effects.saturated / x.numel(), abs=1e-15)
    assert got["underflow"] == effects.underflow / x.numel()
    assert got["flushed"] == effects.flushed / x.numel()
    assert got["saturated_error_share"] == pytest.approx(effects.saturated_error_share)
    assert "beyond_range" not in got
    assert got["of"] == x.numel()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    wrong = flat(formats.quantize(x, name, dtype=exact)) - flat(x)
    assert got["signal"] == pytest.approx((flat(x) ** 2).sum(), rel=1e-12)
    assert got["noise"] == pytest.approx((wrong**2).sum(), rel=1e-6)
    assert "fitted_noise" not in got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_of_what_is_beyond(dtype):
    x = torch.tensor([1e5, 2e5, -3e5, math.inf, -math.inf, -math.inf, math.nan, 1.0]).to(dtype)
    got = pool_of(x, ["e4m3", "mxfp8_e4m3", "int8"]).summary()
    assert got["nan"] == 1
    finite = int(x.isfinite().sum())
    assert got["posinf"] + got["neginf"] + got["nan"] == 8 - finite
    e4m3 = got["formats"]["fp8_e4m3"]
    assert e4m3["upper"] == (2 if finite == 4 else 0) / finite
    assert e4m3["lower"] == (1 if finite == 4 else 0) / finite
    assert e4m3["beyond_range"] == 6 / 8
    blocks = got["formats"]["mxfp8_e4m3"]
    assert (blocks["upper"], blocks["lower"], blocks["signal"]) == (0, 0, 0)
    integers = got["formats"]["int8"]
    assert (integers["upper"], integers["lower"]) == (0, 0)
    assert integers["signal"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_finite_values_that_counting_makes_infinite_saturate(dtype):
    x = torch.tensor([3.4e38, -3.4e38, -3.4e38, math.inf, 1.0]).to(dtype)
    got = pool_of(x, ["e4m3", "bf16", "float32"]).summary()["formats"]
    for name in ("fp8_e4m3", "bf16"):
        assert (got[name]["upper"], got[name]["lower"]) == (1 / 4, 2 / 4)
        assert got[name]["beyond_range"] == 4 / 5
    assert (got["float32"]["upper"], got["float32"]["beyond_range"]) == (0, 1 / 5)


def test_a_share_of_rows_is_seeded_whole_and_scaled_by_the_whole_tensor():
    x = sample(torch.bfloat16, 512, 64)
    x[0, 0] = 1e4
    names = ("mxfp8_e4m3", "nvfp4", "int8")
    few = pool_of(x, names, rows=1000).summary()["formats"]
    assert few == pool_of(x, names, rows=1000).summary()["formats"]
    assert few != pool_of(x, names, rows=1000, seed=1).summary()["formats"]
    # Fifteen rows, and at least four of each power of two.
    assert 15 * 64 <= few["int8"]["of"] <= 32 * 64
    assert few["int8"]["of"] % 64 == 0
    # The outlier stands for one row, and int8's scale is made from it.
    assert few["int8"]["flushed"] > 0.9
    for name in names:
        options = {"granularity": "tensor"} if name == "int8" else {}
        noise = (formats.quantize(x.float(), name, **options) - x).double()
        exact = float(x.double().square().sum() / noise.square().sum())
        got = few[name]["signal"] / few[name]["noise"]
        assert abs(10 * math.log10(got / exact)) < 1.5, name
    wide = pool_of(x.float(), ["e4m3"], rows=1000).summary()["formats"]["fp8_e4m3"]
    assert wide["of"] == few["int8"]["of"]


def test_a_row_longer_than_the_share_gives_runs_of_whole_blocks():
    x = torch.zeros(2, 10_000)
    x.view(-1, 16)[:] = 2.0 ** torch.randint(-8, 8, (1250, 1))
    got = pool_of(x.bfloat16(), ["mxfp8_e4m3", "hif4"], rows=1024).summary()["formats"]
    assert got["mxfp8_e4m3"]["of"] % 64 == 0
    assert 1024 <= got["mxfp8_e4m3"]["of"] <= 1024 + 16 * 4 * 64
    wide = pool_of(x, ["mxfp8_e4m3"], rows=1024).summary()["formats"]["mxfp8_e4m3"]
    assert wide["of"] == got["mxfp8_e4m3"]["of"]
    assert wide["noise"] == 0
    one = pool_of(x[0].bfloat16(), ["mxfp8_e4m3"], rows=10)
    assert 64 <= one.outcomes["mxfp8_e4m3"].of <= 64 * 4 * 16


def test_wide_dtypes_are_limits():
    x = torch.tensor([1e300, -1e300, 1e-40, 1e-60, 1.0, 0.1, 0.0], dtype=torch.float64)
    got = pool_of(x, ["float32", "fp64"]).summary()["formats"]
    assert got["float32"]["upper"] == got["float32"]["lower"] == 1 / 7
    assert got["float32"]["underflow"] == 2 / 7
    assert got["float32"]["flushed"] == 1 / 7
    assert got["float64"]["upper"] == got["float64"]["noise"] == 0
    bf16 = torch.tensor([1e-39, 1.0, math.inf]).bfloat16()
    single = pool_of(bf16, ["float32"]).summary()["formats"]["float32"]
    assert (single["upper"], single["underflow"], single["noise"]) == (0, 1 / 2, 0.0)
    assert single["beyond_range"] == 1 / 3
    assert "beyond_range" in got["float64"]


def test_names_and_edges():
    names = ["bfloat16", "float16", "FP16", "e4m3", "float32", "float64", "mxfp8", "int8"]
    edges = edges_of(names)
    assert list(edges) == ["bf16", "fp16", "fp8_e4m3", "float32", "float64", "mxfp8_e4m3", "int8"]
    assert edges["float32"]["max"] == torch.finfo(torch.float32).max
    assert edges["float32"]["min_normal"] == torch.finfo(torch.float32).tiny
    assert {name for name, edge in edges.items() if edge["scaled"]} == {"mxfp8_e4m3", "int8"}
    assert set(pool_of(torch.ones(3), names).summary()["formats"]) == set(edges)
    with pytest.raises(QgateError, match="e4m4"):
        pool_of(torch.ones(3), ["e4m4"])


def test_too_small_for_bf16_is_underflow_and_not_zero():
    x = torch.tensor([1e-60, 0.0, 1e-42, 1.0], dtype=torch.float64)
    got = pool_of(x, ["e4m3"]).summary()
    assert got["zeros"] == 1
    assert got["amin"] == 1e-60
    assert got["formats"]["fp8_e4m3"]["underflow"] == 0.5
    assert got["formats"]["fp8_e4m3"]["flushed"] == 0.5


@pytest.mark.parametrize("size", [1e-200, 1e200, 1.7976931348623157e308])
def test_ends_of_float64(size):
    x = torch.tensor([1.0, -1.0, 0.5, 1.0], dtype=torch.float64) * size
    got = pool_of(x, ["e4m3", "mxfp8_e4m3"]).summary()
    assert got["std"] == pytest.approx(np.std([1.0, -1.0, 0.5, 1.0]) * size)
    assert got["rms"] == pytest.approx(math.sqrt(3.25 / 4) * size)
    total = (pool_of(x[:2]) + pool_of(x[2:])).summary()
    assert total["rms"] == pytest.approx(got["rms"])
    assert got["formats"]["fp8_e4m3"]["of"] == 0
    json.dumps(got, allow_nan=False)


VALUES = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, 449.0, 2.0**-9, 1e-40]),
)


@settings(max_examples=60)
@given(st.lists(st.lists(VALUES, max_size=20), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_the_pool_of_parts_is_the_pool_of_the_whole(parts, dtype):
    tensors = [torch.tensor(part, dtype=torch.float64).to(dtype) for part in parts]
    pools = [pool_of(t, ELEMENTS) for t in tensors]
    whole = pool_of(torch.cat(tensors), ELEMENTS)
    for order in (pools, pools[::-1]):
        total = order[0]
        for pool in order[1:]:
            total = total + pool
        assert total.tensors == len(parts)
        for name in INTEGERS[1:]:
            assert str(getattr(total, name)) == str(getattr(whole, name)), name
        assert total.counts == whole.counts
        for name, outcome in whole.outcomes.items():
            assert total.outcomes[name].losses == outcome.losses
            assert total.outcomes[name].of == outcome.of
            assert total.outcomes[name].noise == pytest.approx(outcome.noise, rel=1e-9)
        of_parts, of_whole = total.summary(), whole.summary()
        assert of_parts.get("quantiles") == of_whole.get("quantiles")
        assert of_parts.get("rms", 0) == pytest.approx(of_whole.get("rms", 0), rel=1e-9)
        json.dumps(of_parts, allow_nan=False)


def test_one_counted_dtype_makes_a_pool():
    a, b = pool_of(torch.ones(4).bfloat16()), pool_of(torch.arange(5.0))
    total = a + b
    assert total.elements == 9
    assert total.summary()["mean"] == pytest.approx(14 / 9)
    with pytest.raises(QgateError, match=r"bfloat16 and as float16"):
        a + pool_of(torch.ones(4).half())


ODD = {
    "empty": [],
    "one": [3.0],
    "zeros": [0.0, -0.0, 0.0],
    "constant": [0.1] * 7,
    "nan": [math.nan] * 3,
    "inf": [math.inf, -math.inf],
    "mixed": [math.nan, math.inf, -math.inf, 1.0, 0.0],
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors(kind, dtype):
    x = torch.tensor(ODD[kind], dtype=torch.float32).to(dtype)
    for shaped in (x, x.reshape(1, -1), x.reshape(-1, 1), *([x[0]] if len(x) == 1 else [])):
        pool = pool_of(shaped, [*ELEMENTS, *SCALED, "float32"])
        got = pool.summary()
        text = json.dumps(got, allow_nan=False)
        assert "null" not in text
        assert got["nan"] == x.isnan().sum()
        assert got["posinf"] == (x.double() == math.inf).sum()
        json.dumps(channels_of(shaped), allow_nan=False)
        json.dumps((pool + pool).summary(), allow_nan=False)
        if kind == "constant":
            assert got["std"] == 0
            assert "kurtosis" not in got
        if kind in ("empty", "nan", "inf"):
            assert "mean" not in got
            assert "min" not in got
            assert "quantiles" not in got


def test_other_dtypes():
    assert pool_of(torch.ones(3).to(torch.float8_e4m3fnuz)).summary()["max"] == 1.0
    with pytest.raises(QgateError, match="int64"):
        pool_of(torch.arange(3))
    with pytest.raises(QgateError, match="rows 0"):
        pool_of(torch.ones(3), rows=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *NARROW], ids=str)
def test_counts_of_a_dump_say_what_values_say(dtype):
    x = sample(dtype, 3000)
    bits = x.view(torch.uint8 if x.itemsize == 1 else torch.int16).numpy()
    patterns, numbers = np.unique(bits.view(f"u{x.itemsize}"), return_counts=True)
    name, values = str(dtype)[6:], flat(x)
    stats = {"min": values.min(), "max": values.max(), "mean": 0.0, "std": 9.0}
    none = {"nan": 0, "posinf": 0, "neginf": 0}
    pool = pool_of_counts(
        patterns, numbers, name, stats, none, x.numel(), [*ELEMENTS, *SCALED], name
    )
    expected = pool_of(x, ELEMENTS).summary()
    assert pool.summary() == {**expected, "source": "counts"}
    assert (pool + pool_of(x)).source == "counts"


def test_counts_of_a_share_of_a_wide_tensor():
    x = sample(torch.float32, 4000)
    bits = x[:1000].bfloat16().view(torch.int16).numpy().view(np.uint16)
    patterns, numbers = np.unique(bits, return_counts=True)
    stats = {"min": -1e3, "max": 2e3, "mean": 0.25, "std": 2.0}
    kinds = {"nan": 2, "posinf": 1, "neginf": 0}
    pool = pool_of_counts(patterns, numbers, "bfloat16", stats, kinds, 4000, ["e4m3"], "float32")
    got = pool.summary()
    assert (got["elements"], got["counted"], got["nan"], got["posinf"]) == (4000, 1000, 2, 1)
    assert (got["min"], got["max"]) == (-1e3, 2e3)
    assert got["mean"] == pytest.approx(0.25)
    assert got["std"] == pytest.approx(2.0)
    assert got["formats"]["fp8_e4m3"]["of"] == 1000


def test_bad_counts_are_refused():
    none = {"nan": 0, "posinf": 0, "neginf": 0}
    with pytest.raises(QgateError, match="float32"):
        pool_of_counts([1], [1], "float32", {}, none, 1)
    for patterns, numbers in (([1, 2], [1]), ([2**16], [1]), ([1], [-1])):
        with pytest.raises(QgateError, match="do not fit"):
            pool_of_counts(patterns, numbers, "bfloat16", {}, none, 1)


def test_statistics_alone():
    stats = {"min": -3.0, "max": 2.0, "mean": 0.5, "std": 1.5, "amax": 3.0}
    one = pool_of_statistics(stats, {"nan": 1, "posinf": 0, "neginf": 0}, 11)
    got = one.summary()
    assert got["source"] == "statistics"
    assert (got["counted"], got["elements"], got["nan"]) == (0, 11, 1)
    assert got["std"] == pytest.approx(1.5)
    other = pool_of_statistics({**stats, "mean": 2.5, "max": 9.0}, {}, 10)
    total = (one + other).summary()
    assert total["mean"] == pytest.approx(1.5)
    assert total["std"] == pytest.approx(math.sqrt(1.5**2 + 1))
    assert total["max"] == 9.0
    empty = pool_of_statistics({}, {}, 0).summary()
    assert "mean" not in empty
    assert not {"zeros", "quantiles", "formats"} & set(got)


@pytest.mark.parametrize("dtype", [*DTYPES, *NARROW], ids=str)
def test_channels(dtype):
    x = sample(dtype, 7, 50, 200)
    x[3, 4, 17] = 300.0
    got = channels_of(x)
    sizes = np.abs(flat(x).reshape(-1, 200)).max(axis=0)
    assert got["count"] == 200
    assert got["median"] == np.median(sizes)
    assert got["largest"][0] == (17, flat(x).max())
    order = np.sort(sizes)[::-1]
    assert [size for _, size in got["largest"]] == order[: len(got["largest"])].tolist()
    assert len(got["curve"]) == 65
    assert (got["curve"][0], got["curve"][-1]) == (order[0], order[-1])


def test_channels_of_odd_tensors():
    x = torch.tensor([[math.nan, math.inf, 1.0], [2.0, -math.inf, -3.0]])
    assert channels_of(x)["curve"] == [3.0, 2.0, 0.0]
    assert channels_of(torch.tensor(-2.0))["curve"] == [2.0]
    assert channels_of(torch.empty(0, 4))["curve"] == [0.0] * 4
    assert channels_of(torch.empty(3, 0))["count"] == 0
    wide = torch.zeros(2, 300_000).bfloat16()
    wide[1, 299_999] = -5
    assert channels_of(wide)["largest"][0] == (299_999, 5.0)


def test_a_pool_is_small():
    pool = pool_of(sample(torch.bfloat16, 100_000), ELEMENTS)
    assert isinstance(pool, Pool)
    assert pool.counts.nbytes < 100_000
    assert pool.counts.n == 100_000


@settings(max_examples=25)
@given(st.data())
def test_many_pools_together_have_the_bits_of_adding_one_by_one(data):
    """Also where some were rounded to be counted, and some hold nothing finite."""
    kinds = st.tuples(st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 9))
    examples = data.draw(st.lists(kinds, min_size=1, max_size=6))
    pools = [
        pool_of(
            torch.full((3,), math.nan, dtype=dtype) if seed == 0 else sample(dtype, 70, seed=seed),
            formats=("fp8_e4m3", "mxfp4_e2m1"),
        )
        for dtype, seed in examples
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pool, "_AT_ONCE", data.draw(st.integers(0, 200)))
        pooling = Pooling()
        for pool in pools:
            pooling.add(pool)
    for whole in (Pool.together(pools), pooling.pool):
        one_by_one = functools.reduce(operator.add, pools)
        assert repr(whole) == repr(one_by_one)
        assert whole.counts == one_by_one.counts
        assert whole.outcomes == one_by_one.outcomes
        assert [part.dtype for part in whole.counts.occurring] == [np.uint16, np.int64]


def test_pools_of_few_patterns_do_not_pile_up():
    pooling = Pooling()
    one = pool_of_statistics({"min": -1.0, "max": 1.0, "mean": 0.0, "std": 0.5}, {}, 8)
    for _ in range(1000):
        pooling.add(one)
        assert len(pooling._waiting) <= 65
    assert pooling.pool.tensors == 1000
