"""The pass for tensors of a device says what the pass for the CPU says; run on the CPU here."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qgate.stats import _device_pass
from qgate.stats._device_pass import DevicePass
from qgate.stats.error_stats import errors


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`errors` as if the CPU were a device, in parts of 3000."""

    def run(a: Tensor, r: Tensor, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(_device_pass, "serves", lambda *_: True)
            patch.setattr(_device_pass, "_PART", 3000)
            return errors(a, r, **options)

    return run


def pair(n: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(n, generator=generator)
    a = r + 0.01 * torch.randn(n, generator=generator)
    return a.to(dtype), r.to(dtype)


def same(device: Any, cpu: Any) -> None:
    """Counts, places and extremes exactly; sums to 1e-14 of the sums of magnitudes."""
    for name in [
        "elements",
        "actual_non_finite",
        "reference_non_finite",
        "mismatched",
        "sign_flips",
        "worst",
        "first_non_finite",
    ]:
        assert repr(getattr(device, name)) == repr(getattr(cpu, name)), name
    assert (device.differences.keys == cpu.differences.keys).all()
    assert (device.differences.counts == cpu.differences.counts).all()
    device_sums, cpu_sums = asdict(device.sums), asdict(cpu.sums)
    for name in ("count", "max_abs_error", "max_abs_reference"):
        assert device_sums[name] == cpu_sums[name], name
    largest = max(abs(v) for v in cpu_sums.values()) if cpu.sums.count else 0
    for name, value in cpu_sums.items():
        assert math.isclose(device_sums[name], value, rel_tol=1e-13, abs_tol=1e-15 * largest), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 1023, 3000, 3001, 40_000])
def test_it_finds_the_same(on_device: Any, dtype: torch.dtype, n: int) -> None:
    a, r = pair(n, dtype)
    same(on_device(a, r), errors(a, r))


def test_views_and_shapes(on_device: Any) -> None:
    a, r = (tensor.view(100, 123) for tensor in pair(12_300, torch.bfloat16))
    same(on_device(a.t()[::2], r.t()[::2]), errors(a.t()[::2], r.t()[::2]))


def test_what_is_not_finite(on_device: Any) -> None:
    a, r = pair(9_000, torch.float32)
    for index, x, y in [(4000, math.nan, 1.0), (4001, math.inf, math.inf), (8999, 1.0, -math.inf)]:
        a[index], r[index] = x, y
    device_stats = on_device(a, r)
    same(device_stats, errors(a, r))
    assert device_stats.first_non_finite.flat == 4000
    assert device_stats.mismatched == 2


def test_equals_keep_their_order_and_constants_have_no_variance(on_device: Any) -> None:
    r = torch.full((7000,), 0.1)
    a = r.clone()
    a[::5] += 1.0
    device_stats = on_device(a, r, worst=7)
    assert [element.flat for element in device_stats.worst] == list(range(0, 35, 5))
    assert device_stats.sums.m2_reference == 0.0
    same(device_stats, errors(a, r, worst=7))
    assert on_device(r, r).sums.max_abs_error == 0.0


NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, 3.4e38, math.inf, math.nan]),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40))
def test_any_pairs(pairs: list[tuple[float, float]]) -> None:
    a, r = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    work = DevicePass(5)
    work.run(a, r)
    cpu = errors(a, r, worst=5)
    assert (work.elements, work.mismatched, work.sign_flips) == (
        cpu.elements,
        cpu.mismatched,
        cpu.sign_flips,
    )
    assert (work.actual, work.reference) == (cpu.actual_non_finite, cpu.reference_non_finite)
    assert [element.flat for element in work.worst] == [
        cpu_element.flat for cpu_element in cpu.worst
    ]
    assert work.sums.max_abs_error == cpu.sums.max_abs_error
    assert (work.differences.counts == cpu.differences.counts).all()
    magnitudes = (a.double().abs() + r.double().abs()).nan_to_num(0, 0, 0)
    room = 1e-15 * float(magnitudes.square().sum()) + 1e-300
    for name in ("sum_square_error", "sum_square_actual", "dot", "m2_actual", "co"):
        assert abs(getattr(work.sums, name) - getattr(cpu.sums, name)) <= room, name


def test_its_sums_do_not_depend_on_threads() -> None:
    a, r = pair(300_000, torch.bfloat16)
    before, sums = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            work = DevicePass(3)
            work.run(a, r)
            sums.append(work.sums)
    finally:
        torch.set_num_threads(before)
    assert sums[0] == sums[1]
