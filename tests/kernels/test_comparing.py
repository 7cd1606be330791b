"""Partial sums of pairs: their definition against numpy, and what their proof does not let pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.kernels import cases, comparing, proving
from qgate.kernels.comparing import COUNTS, EXTREMES, SUMS, TILE, Partials
from qgate.kernels.proving import KernelWarning
from qgate.stats import _device_pass
from qgate.stats._error_pass import SHIFT
from qgate.stats.error_stats import ErrorStats, errors
from tests.kernels import checks
from tests.shares import share

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
PAIRS = [(BF16, BF16), (FP16, FP32), (FP32, BF16)]
Kernel = Callable[[Tensor, Tensor, int], Partials]

right: Kernel = comparing.compare_by_torch


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ErrorStats]:
    """`errors` as of a device that has kernels."""
    monkeypatch.setattr(_device_pass, "serves", lambda *_: True)
    monkeypatch.setattr(proving, "_verdicts", {})
    monkeypatch.setattr(proving, "serves", lambda device: device == CPU)
    monkeypatch.setattr(comparing, "compare_by_kernel", right)
    return errors


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof on fewer numbers, spread over all there are."""
    every = cases.numbers
    monkeypatch.setattr(cases, "numbers", lambda dtype: every(dtype)[::9])


def of_tile(a: np.ndarray, r: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and their magnitudes by fsum, and whatever has to be exact."""
    good = np.isfinite(a) & np.isfinite(r)
    kinds = [np.where(np.isnan(x), 1, np.where(np.isinf(x), 2 + (x < 0), 0)) for x in (a, r)]
    x, y = a[good], r[good]
    e, n = x - y, max(int(good.sum()), 1)
    mean_a, mean_r = math.fsum(x) / n, math.fsum(y) / n
    terms = {
        "sum_a": x, "sum_r": y, "m2_a": (x - mean_a) ** 2, "m2_r": (y - mean_r) ** 2,
        "co": (x - mean_a) * (y - mean_r), "squares": e**2, "abs_error": abs(e), "error": e,
        "abs_reference": abs(y),
    }  # fmt: skip
    exact = {
        "pairs": int(good.sum()), "flips": int((np.sign(x) * np.sign(y) < 0).sum()),
        "mismatched": int((kinds[0] != kinds[1]).sum()),
        "max_error": max(abs(e), default=0.0),
        "least_a": min(x, default=math.inf), "most_a": max(x, default=-math.inf),
        "least_r": min(y, default=math.inf), "most_r": max(y, default=-math.inf),
    }  # fmt: skip
    for side, of in zip("ar", kinds, strict=True):
        for kind, name in enumerate(("nan", "posinf", "neginf"), 1):
            exact[f"{name}_{side}"] = int((of == kind).sum())
    return {name: np.array([math.fsum(t), math.fsum(abs(t))]) for name, t in terms.items()}, exact


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.usefixtures("few")
def test_the_definition_is_what_numpy_says(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    tile_count = 0
    for a, r in comparing.trials(*dtypes):
        partials = comparing.compare_by_torch(a, r, SHIFT)
        rows = dict(zip(SUMS, partials.sums, strict=True))
        rows |= dict(zip(EXTREMES, partials.extremes, strict=True))
        rows |= dict(zip(COUNTS, partials.counts, strict=True))
        wide_a, wide_r = a.double().numpy(), r.double().numpy()
        for i in range(partials.sums.shape[1]):
            part = slice(i * TILE, (i + 1) * TILE)
            sums, exact = of_tile(wide_a[part], wide_r[part])
            assert {name: rows[name][i].item() for name in exact} == exact
            pair_count = max(exact["pairs"], 1)
            for side, wide in zip("ar", (wide_a[part], wide_r[part]), strict=True):
                finite = wide[np.isfinite(wide_a[part]) & np.isfinite(wide_r[part])]
                deviations = finite - rows[f"sum_{side}"][i].item() / pair_count
                sums[f"rest_{side}"] = np.array([math.fsum(deviations), math.fsum(abs(finite))])
            assert {*sums} == {*SUMS}
            for name, (exact_sum, magnitude) in sums.items():
                assert abs(rows[name][i].item() - exact_sum) <= 4e-15 * magnitude, (name, i)
            tile_count += 1
        with np.errstate(invalid="ignore"):
            error = np.abs(wide_a - wide_r)
        keys = error[np.isfinite(error)].view(np.int64) >> SHIFT
        assert (partials.keys.numpy() == np.bincount(keys, minlength=len(partials.keys))).all()
    assert tile_count > 15


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_errors_are_those_of_the_cpu(
    there: Callable[..., ErrorStats], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for a, r in comparing.trials(*dtypes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_device_pass, "serves", lambda *_: False)
            on_cpu = errors(a, r, worst=7)
        assert checks.errors_apart(there(a, r, worst=7), on_cpu) == ""


def test_of_nothing_there_is_nothing(there: Callable[..., ErrorStats]) -> None:
    stats = there(torch.empty(0, 5), torch.empty(0, 5))
    assert (stats.elements, stats.sums.count, stats.worst) == (0, 0, ())


def test_parts_and_slices_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    a, r = (cases.bell_curve(FP32, e, 5 * TILE + 9) for e in (0, 1))
    whole = comparing.compare_by_torch(a, r, SHIFT)
    monkeypatch.setattr(comparing, "_SLICE", 2 * TILE)
    assert comparing.first_difference(comparing.compare_by_torch(a, r, SHIFT), whole) == ""


@pytest.mark.parametrize("room", [1, 3, 40, 50_000])
def test_the_worst_are_found_in_few_tiles(there: Callable[..., ErrorStats], room: int) -> None:
    """Ties within and between tiles, tiles without any difference, more room than differences."""
    r = torch.zeros(9 * TILE + 5)
    a = r.clone()
    a[2 * TILE : 6 * TILE : 3] = 1.0
    a[3 * TILE + 1 :: 1000] = -1.0
    a[5 * TILE + 7], a[8 * TILE + 4], a[11], a[12] = 3.0, -2.0, math.nan, 0.5
    order = np.lexsort((np.arange(len(a)), -np.nan_to_num(abs(a.numpy()))))
    worst_indices = [int(i) for i in order[:room] if abs(a[i]) > 0]
    assert [element.flat for element in there(a, r, worst=room).worst] == worst_indices


def test_a_kernel_that_is_right_is_used(
    there: Callable[..., ErrorStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def kernel(a: Tensor, r: Tensor, shift: int) -> Partials:
        lengths.append(len(a))
        return right(a, r, shift)

    monkeypatch.setattr(comparing, "compare_by_kernel", kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = there(torch.ones(70), torch.zeros(70))
        proof = len(lengths)
        assert there(torch.ones(70), torch.zeros(70)).sums == first.sums
    assert max(lengths) > 2**16
    assert lengths[proof - 1 :] == [70, 70]
    there(torch.ones(70), torch.zeros(70).half())
    assert len(lengths) > proof + 3, "another pair of dtypes is another proof"


def changed(row: str, by: Callable[[Tensor], Tensor]) -> Kernel:
    def kernel(a: Tensor, r: Tensor, shift: int) -> Partials:
        partials = right(a, r, shift)
        for names, table in (
            (SUMS, partials.sums),
            (EXTREMES, partials.extremes),
            (COUNTS, partials.counts),
        ):
            if row in names:
                table[names.index(row)] = by(table[names.index(row)])
        return partials

    return kernel


def on(change: Callable[[Tensor], Tensor]) -> Kernel:
    return lambda a, r, shift: right(change(a), change(r), shift)


def flushed(x: Tensor) -> Tensor:
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).smallest_normal, 0)


def as_one_infinity(x: Tensor) -> Tensor:
    return x.masked_fill(x == -math.inf, math.inf)


def other_keys(a: Tensor, r: Tensor, shift: int) -> Partials:
    partials = right(a, r, shift)
    return Partials(partials.sums, partials.extremes, partials.counts, partials.keys.roll(1))


def other_order(a: Tensor, r: Tensor, shift: int) -> Partials:
    """The same terms, the last first."""
    back, partials = right(a.flip(0), r.flip(0), shift), right(a, r, shift)
    return Partials(back.sums.flip(1), partials.extremes, partials.counts, partials.keys)


def short_tail(a: Tensor, r: Tensor, shift: int) -> Partials:
    partials, n = right(a, r, shift), len(a) // 128 * 128
    return right(a[:n], r[:n], shift) if n else partials


WRONG: dict[str, Kernel] = {
    "squares in float32": changed("squares", lambda x: x.float().double()),
    "the largest in float32": changed("max_error", lambda x: x.float().double()),
    "one infinity": on(as_one_infinity),
    "flushed": on(flushed),
    "other order": other_order,
    "other keys": other_keys,
    "short tail": short_tail,
    **{name: changed(name, lambda x: torch.nextafter(x, x + 1)) for name in (*SUMS, *EXTREMES)},
    **{name: changed(name, lambda x: x + 1) for name in COUNTS},
}


@share(6)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("few")
def test_a_wrong_rule_is_told_of_and_not_used(
    there: Callable[..., ErrorStats], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    a, r = torch.ones(70), torch.zeros(70)
    stats_before = there(a, r)
    monkeypatch.setattr(proving, "_verdicts", {})
    monkeypatch.setattr(comparing, "compare_by_kernel", WRONG[name])
    with pytest.warns(KernelWarning, match="errors of float32 tensors against float32") as caught:
        stats_after = there(a, r)
    assert len(caught) == 1
    assert stats_after.sums == stats_before.sums
