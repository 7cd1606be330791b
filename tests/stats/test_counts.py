"""Counts against numpy and scipy on the values themselves."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from qgate.errors import QgateError
from qgate.stats import Counts, Values, block_counts, counts

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def some(dtype: torch.dtype, size: int = 20_000, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.exp(torch.randn(size, generator=generator))
    x[::50] = 0.0
    x[1::50] = -0.0
    return x.clamp(-400, 400).to(dtype)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).double().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_the_values(dtype: torch.dtype) -> None:
    x = some(dtype)
    values = as_numpy(x)
    for counted in (counts(x), counts(x.float()), counts(x.double())):
        assert counted.n == counted.finite == x.numel()
        assert counted.zeros == int((values == 0).sum())
        assert (counted.min, counted.max) == (values.min(), values.max())
        assert counted.amax == np.abs(values).max()
        assert counted.amin == np.abs(values[values != 0]).min()
        assert counted.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-15)
        assert counted.std == pytest.approx(values.std(), rel=1e-12)
        assert counted.skew == pytest.approx(scipy_stats.skew(values), rel=1e-9, abs=1e-9)
        assert counted.kurtosis == pytest.approx(scipy_stats.kurtosis(values), rel=1e-9)
        for q in (0, 0.1, 25, 50, 99, 99.95, 100):
            assert counted.percentile(q) == pytest.approx(np.percentile(values, q), rel=1e-13)
            magnitude = counted.percentile(q, of="magnitude")
            assert magnitude == pytest.approx(np.percentile(np.abs(values), q), rel=1e-13)
        for bins, span in ((10, None), (7, (-1.0, 2.0))):
            expected, edges = np.histogram(values, bins=bins, range=span)
            got, got_edges = counted.histogram(bins, span)
            assert got.tolist() == expected.tolist()
            assert got_edges.tolist() == edges.tolist()
        exponents = np.floor(np.log2(np.abs(values[values != 0]))).astype(int)
        assert counted.log2_histogram() == {
            int(e): int((exponents == e).sum()) for e in np.unique(exponents)
        }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_mean_and_std_of_two_powers_have_the_bits_of_four(dtype: torch.dtype, shift: float) -> None:
    for seed in range(5):
        statistics = counts((some(dtype, 999, seed).float() + shift).to(dtype))
        figures = statistics.moments.figures()
        assert (statistics.mean, statistics.std) == (figures["mean"], figures["std"])
    combined = counts(some(dtype)) + statistics
    before = combined.mean
    combined.add(counts(torch.full((9999,), 7.0, dtype=dtype)))
    assert combined.mean == combined.moments.figures()["mean"] != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_is_counted_as_what_it_is(dtype: torch.dtype) -> None:
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    bits = bits.to(torch.uint8) if dtype.itemsize == 1 else bits.to(torch.int16)
    x = bits.view(dtype)
    values = as_numpy(x)
    statistics = counts(x)
    assert (statistics.counts == 1).all()
    assert statistics.nan == int(np.isnan(values).sum()) > 0
    assert statistics.posinf == int((values == np.inf).sum())
    assert statistics.neginf == int((values == -np.inf).sum())
    got, weights = statistics.weighted()
    expected, expected_weights = np.unique(values[np.isfinite(values)], return_counts=True)
    assert got.tolist() == expected.tolist()
    assert weights.tolist() == expected_weights.tolist()


def test_direct_values_count_what_is_not_finite() -> None:
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, -math.inf, 0.0])
    statistics = counts(x)
    assert isinstance(statistics, Values)
    assert (
        statistics.n,
        statistics.finite,
        statistics.nan,
        statistics.posinf,
        statistics.neginf,
    ) == (6, 2, 1, 1, 2)
    assert (statistics.min, statistics.max, statistics.zeros) == (0.0, 1.0, 1)


def test_chunks_and_merging_are_the_whole() -> None:
    x = some(torch.bfloat16, 3 * 2**18 + 17)
    whole = counts(x)
    assert counts(x.split(100_001)) == whole
    assert counts(part for part in x.split(70_000)) == whole
    a, b, c = (counts(part) for part in x.split(300_000))
    assert (a + b) + c == a + (b + c) == c + (a + b) == whole
    assert counts(x.view(-1, 1)[::2]) + counts(x.view(-1, 1)[1::2]) == whole


def test_a_billion_elements_by_merging() -> None:
    part = counts(some(torch.bfloat16, 2**15))
    total = part
    for _ in range(15):
        total = total + total
    assert total.n == 2**30
    assert total.mean == pytest.approx(part.mean, rel=1e-12)
    assert total.std == pytest.approx(part.std, rel=1e-12)
    assert total.percentile(37.5) == pytest.approx(part.percentile(37.5), rel=1e-2)


def test_memory_mapped_arrays_are_counted_without_warnings(tmp_path: Path) -> None:
    x = some(torch.float16)
    np.save(tmp_path / "x.npy", x.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts(np.load(tmp_path / "x.npy", mmap_mode="r")) == counts(x)


def test_rounding_first_is_asked_for_and_said() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert counts(x, via="bf16") == counts(x.bfloat16())
    assert counts(x, via="bf16").rounded_from == "float32"
    assert counts(x.bfloat16()).rounded_from is None


def test_saved_counts_come_back(tmp_path: Path) -> None:
    for x in (some(torch.bfloat16), torch.tensor([math.nan, math.inf, 0.0]).half()):
        counts(x, via=None).save(tmp_path / "c.npz")
        assert Counts.load(tmp_path / "c.npz") == counts(x)
    assert [p.name for p in tmp_path.iterdir()] == ["c.npz"]
    assert (tmp_path / "c.npz").stat().st_size < 200_000


def test_files_that_are_no_counts_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.npz"
    with pytest.raises(QgateError, match="no file"):
        Counts.load(bad)
    bad.write_bytes(b"PK not really")
    with pytest.raises(QgateError, match="is not a file of counts"):
        Counts.load(bad)
    np.savez(bad, a=np.arange(3))
    with pytest.raises(QgateError, match="is not a file of counts"):
        Counts.load(bad)
    np.savez(
        bad,
        qgate=np.array("counts 1"),
        dtype=np.array("float8_e5m2"),
        rounded_from=np.array(""),
        patterns=np.array([300], dtype=np.uint16),
        counts=np.array([1]),
    )
    with pytest.raises(QgateError, match="damaged"):
        Counts.load(bad)
    np.savez(bad, qgate=np.array([object()], dtype=object))
    with pytest.raises(QgateError, match="is not a file of counts"):
        Counts.load(bad)


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        counts(torch.arange(3))
    with pytest.raises(TypeError, match="str"):
        counts("file.pt")
    with pytest.raises(QgateError, match="'bf61'"):
        counts(torch.zeros(3), via="bf61")  # type: ignore[arg-type]
    with pytest.raises(QgateError, match="do not add up"):
        _ = counts(torch.zeros(3).half()) + counts(torch.zeros(3).bfloat16())
    with pytest.raises(QgateError, match="do not add up"):
        counts([torch.zeros(3).half(), torch.zeros(3)])
    with pytest.raises(QgateError, match="nothing to count"):
        counts([])


def test_empty_and_constant() -> None:
    empty = counts(torch.empty(0).bfloat16())
    assert empty.n == 0
    assert all(math.isnan(v) for v in (empty.mean, empty.std, empty.min, empty.percentile(50)))
    for constant in (counts(torch.full((9,), 2.5).bfloat16()), counts(torch.full((9,), 2.5))):
        assert (constant.mean, constant.std) == (2.5, 0.0)
        assert math.isnan(constant.skew)


@given(st.integers(1, 70), st.integers(1, 40), st.integers(0, 1), st.integers(0, 2**31))
@settings(max_examples=60)
def test_block_counts_against_a_loop(length: int, block: int, axis: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, length, generator=generator)
    x = (x * torch.exp2(torch.randint(-20, 15, (5, 1), generator=generator))).half()
    x[0, 0] = math.inf if seed % 3 == 0 else 0.0
    block_statistics = block_counts(x, block=block, axis=axis)
    expected: dict[int, dict[float, int]] = {}
    poisoned = 0
    for line in as_numpy(x.movedim(axis, -1)).tolist():
        for start in range(0, len(line), block):
            part = line[start : start + block]
            if not all(map(math.isfinite, part)):
                poisoned += len(part)
                continue
            amax = max(map(abs, part))
            exponent = math.frexp(amax)[1] - 1 if amax else -127
            row = expected.setdefault(exponent, {})
            for value in part:
                row[value] = row.get(value, 0) + 1
    assert block_statistics.poisoned.n == poisoned
    got: dict[int, dict[float, int]] = {}
    for exponent, counted in block_statistics.rows.items():
        row = got.setdefault(exponent, {})
        values, weights = counted.weighted()
        for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
            row[value] = row.get(value, 0) + weight
    assert got == expected
    assert block_statistics.n == x.numel()


def test_block_counts_merge_and_large_tensors() -> None:
    x = some(torch.bfloat16, 2**22 + 2**18).view(-1, 2**10)
    whole = block_counts(x)
    parts = block_counts(x[:1000]) + block_counts(x[1000:])
    assert whole.n == parts.n == x.numel()
    assert set(whole.rows) == set(parts.rows)
    assert all(whole.rows[e] == parts.rows[e] for e in whole.rows)
    flat = block_counts(x.reshape(-1))
    assert all(whole.rows[e] == flat.rows[e] for e in whole.rows)
    with pytest.raises(QgateError, match="blocks"):
        _ = whole + block_counts(x, block=16)
    with pytest.raises(TypeError, match="float32"):
        block_counts(torch.zeros(3))
    with pytest.raises(QgateError, match="block 0"):
        block_counts(x, block=0)
    with pytest.raises(QgateError, match="axis 2"):
        block_counts(x, axis=2)


def test_arguments_are_not_written_to() -> None:
    for x in (some(torch.bfloat16), some(torch.float16).float()):
        before = x.clone()
        statistics = counts(x)
        statistics.percentile(30)
        if x.dtype == torch.bfloat16:
            block_counts(x)
        assert torch.equal(x.view(torch.int16), before.view(torch.int16))
