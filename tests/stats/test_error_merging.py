"""Merging: parts, in any grouping and order, say what the whole says; views per channel and token."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats import ErrorSums
from qgate.stats._portion import ELEMENTS
from qgate.stats.error_stats import ErrorStats, errors
from tests.shares import proof
from tests.stats.exact import agree, exact_metrics

INF, NAN = math.inf, math.nan
MOST = 400


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Tensors with a mean, a spread, a noise and now and then something that is not finite."""
    size = draw(st.integers(0, MOST))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = 10.0 ** draw(st.integers(-3, 3))
    reference = torch.randn(size, generator=generator, dtype=torch.float64) * spread
    reference += draw(st.sampled_from([0.0, 1.0, -1e6])) * spread
    noise = torch.randn(size, generator=generator, dtype=torch.float64) * spread
    actual = reference + noise * draw(st.sampled_from([0.0, 1e-6, 0.1, 10.0]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    actual, reference = actual.to(dtype), reference.to(dtype)
    for side in (actual, reference):
        if size and draw(st.booleans()):
            side[draw(st.integers(0, size - 1))] = draw(st.sampled_from([NAN, INF, -INF, 0.0]))
    return actual, reference


def both(one: ErrorStats, other: ErrorStats) -> None:
    """Counts alike to the last one, metrics as far as float64 can tell."""
    exact = ("elements", "actual_non_finite", "reference_non_finite", "mismatched", "sign_flips")
    for name in exact:
        assert getattr(one, name) == getattr(other, name)
    assert one.sums.count == other.sums.count
    assert one.sums.max_abs_error == other.sums.max_abs_error
    assert one.differences.keys.tolist() == other.differences.keys.tolist()
    assert one.differences.counts.tolist() == other.differences.counts.tolist()
    metrics, expected = (stats.metrics(finite_only=True) for stats in (one, other))
    agree(metrics, expected, 1e-12)
    assert one.metrics().keys() == other.metrics().keys()
    assert one.finite == other.finite


@proof
@given(pairs(), pairs())
def test_the_order_of_two_does_not_matter_in_the_last_bit(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> None:
    a, b = errors(*one), errors(*other)
    assert (a + b).sums == (b + a).sums
    both(a + b, b + a)
    assert (a + b).percentiles(finite_only=True) == (b + a).percentiles(finite_only=True)


@given(pairs(), pairs(), pairs())
def test_the_grouping_of_three_does_not_matter(
    one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor], three: tuple[Tensor, Tensor]
) -> None:
    a, b, c = errors(*one), errors(*two), errors(*three)
    both((a + b) + c, a + (b + c))
    both((a + b) + c, (c + a) + b)
    assert ((a + b) + c).worst == (a + (b + c)).worst
    assert repr(((a + b) + c).first_non_finite) == repr((a + (b + c)).first_non_finite)


@given(pairs(), st.lists(st.integers(0, MOST), max_size=6), st.randoms())
def test_parts_say_what_the_whole_says(
    tensors: tuple[Tensor, Tensor], cuts: list[int], random: object
) -> None:
    actual, reference = tensors
    whole = errors(actual, reference)
    ends = [0, *sorted(min(cut, len(actual)) for cut in cuts), len(actual)]
    parts = [errors(actual[i:j], reference[i:j]) for i, j in itertools.pairwise(ends)]
    in_order = parts[0]
    for part in parts[1:]:
        in_order = in_order + part
    both(in_order, whole)
    assert [(e.flat, e.difference) for e in in_order.worst] == [(e.flat, e.difference) for e in whole.worst]  # fmt: skip
    while len(parts) > 1:
        one = parts.pop(random.randrange(len(parts)))  # type: ignore[attr-defined]
        i = random.randrange(len(parts))  # type: ignore[attr-defined]
        parts[i] = parts[i] + one
    both(parts[0], whole)


def test_nothing_is_neutral() -> None:
    actual, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    stats, empty = errors(actual, reference), errors(actual[:0], reference[:0])
    assert (stats + empty).sums == (empty + stats).sums == stats.sums
    assert (empty + stats).worst == stats.worst
    assert ErrorSums() + stats.sums == stats.sums
    both(stats + empty, stats)


def test_a_billion_elements() -> None:
    """Merged with itself 2^20 times over: every metric of the repetitions is that of the parts."""
    generator = torch.Generator().manual_seed(8)
    parts = []
    for mean in (1e4, 1e4 + 3):
        reference = mean + torch.randn(500, generator=generator)
        parts.append((reference + 0.1 * torch.randn(500, generator=generator), reference))
    expected = exact_metrics(*(torch.cat(side) for side in zip(*parts, strict=True)))
    total = errors(*parts[0]) + errors(*parts[1])
    first = total
    for _ in range(20):
        total = total + total
    assert total.elements == total.sums.count == 1000 * 2**20 > 10**9
    agree(total.metrics(), expected, 1e-12)
    assert total.sign_flips == 2**20 * first.sign_flips
    assert total.percentiles() == first.percentiles()
    assert total.sums.sum_abs_error == 2**20 * first.sums.sum_abs_error
    other = errors(*parts[0])
    for _ in range(21):  # the other half first: unequal means meet last
        other = other + other
    last = errors(*parts[1])
    for _ in range(21):
        last = last + last
    agree((other + last).metrics(), expected, 1e-12)
    assert (other + last).elements == 2 * total.elements


def test_shards_whose_means_are_far_from_zero_and_apart() -> None:
    """A float64 mean of 1e8 has 8 digits behind the point, too few for what is between shards."""
    generator = torch.Generator().manual_seed(4)
    shards = []
    for i in range(9):
        reference = 1e8 + i + torch.randn(30, generator=generator, dtype=torch.float64)
        noise = torch.randn(30, generator=generator, dtype=torch.float64)
        shards.append((reference + noise, reference))
    expected = exact_metrics(*(torch.cat(side) for side in zip(*shards, strict=True)))
    for step in (1, 2, 4, 5, 7):
        total = errors(*shards[0])
        for i in range(1, 9):
            total = total + errors(*shards[i * step % 9])
        assert total.metric("correlation") == pytest.approx(expected["correlation"], rel=1e-13)


def test_the_worst_of_parts_count_on() -> None:
    reference = torch.zeros(2, 100)
    actual = torch.arange(200.0).view(2, 100)
    merged = errors(actual[0], reference[0], worst=3) + errors(actual[1], reference[1], worst=5)
    assert [(element.flat, element.index) for element in merged.worst] == [
        (199, (99,)), (198, (98,)), (197, (97,)),
    ]  # fmt: skip
    tied = errors(reference[0] + 1, reference[0], worst=2)
    assert [tied_element.flat for tied_element in (tied + tied).worst] == [0, 1]
    actual[1, 7] = NAN
    first = (tied + errors(actual[1], reference[1])).first_non_finite
    assert first is not None
    assert (first.flat, first.index) == (107, (7,))


def per_index(actual: Tensor, reference: Tensor, axis: int) -> dict[str, np.ndarray]:
    """Numpy's way: the axis first, the rest flat."""
    a, r = (np.moveaxis(x.double().numpy(), axis, 0) for x in (actual, reference))
    a, r = a.reshape(len(a), -1), r.reshape(len(r), -1)
    e = a - r
    with np.errstate(divide="ignore", invalid="ignore"):
        noise, signal = (e**2).sum(1), (r**2).sum(1)
        return {
            "mse": (e**2).mean(1),
            "mae": np.abs(e).mean(1),
            "max_abs": np.abs(e).max(1),
            "relative_mse": np.where(noise == 0, 0, noise / signal),
            "sqnr_db": np.where(noise == 0, INF, 10 * np.log10(signal / noise)),
        }


SHAPES = [(7, 5), (3, 4, 5), (2, 100_001), (100_001, 2), (1, 40_000, 2), (50, 31, 64), (6,), (2, 3, 4, 1, 5)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_views_against_numpy(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(shape, generator=generator)
    actual = reference + 0.1 * torch.randn(shape, generator=generator)
    actual.select(0, 0).copy_(reference.select(0, 0))
    reference.select(-1, shape[-1] - 1).zero_()
    for axis in range(len(shape)):
        stats = errors(actual, reference, channel_axis=axis, token_axis=axis - len(shape))
        for view in (stats.channels, stats.tokens):
            assert view is not None
            assert view.axis == axis
            assert len(view) == shape[axis]
            assert view.count.tolist() == [math.prod(shape) // shape[axis]] * shape[axis]
            for name, expected in per_index(actual, reference, axis).items():
                np.testing.assert_allclose(
                    getattr(view, name), expected, 1e-12, 1e-13, err_msg=name
                )
        same = errors(actual.transpose(0, -1), reference.transpose(0, -1), channel_axis=-1)
        if axis == 0:
            np.testing.assert_allclose(same.channels.mse, stats.channels.mse, rtol=1e-12)


def test_views_do_not_change_the_rest() -> None:
    actual, reference = torch.randn(2, 70, 1000, generator=torch.Generator().manual_seed(1))
    plain, viewed = errors(actual, reference), errors(actual, reference, channel_axis=1)
    assert viewed.sums == plain.sums
    assert viewed.worst == plain.worst
    assert plain.channels is plain.tokens is None


def test_views_where_values_are_not_finite() -> None:
    actual, reference = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    clean = errors(actual, reference, channel_axis=0).channels
    actual[1, 7], reference[1, 9], reference[2, 9] = NAN, INF, NAN
    channels = errors(actual, reference, channel_axis=0).channels
    assert channels.non_finite.tolist() == [0, 2, 1]
    assert channels.count.tolist() == [50, 48, 49]
    assert np.isnan(channels.mse).tolist() == [False, True, True]
    assert np.isnan(channels.sqnr_db).tolist() == [False, True, True]
    assert channels.mse[0] == clean.mse[0]
    finite = [i for i in range(50) if i not in (7, 9)]
    expected = per_index(actual[1:2, finite], reference[1:2, finite], 0)["mse"]
    assert channels.finite_only().mse[1] == pytest.approx(expected[0], rel=1e-12)


def test_views_where_squares_leave_float64() -> None:
    reference = torch.tensor([[1e-200], [1e200], [1.0]], dtype=torch.float64)
    channels = errors(reference * 2, reference, channel_axis=0).channels
    assert channels.mae.tolist() == [1e-200, 1e200, 1.0]
    assert np.isnan(channels.sqnr_db).tolist() == [True, True, False]
    assert np.isnan(channels.relative_mse).tolist() == [True, True, False]
    one = torch.ones(1, 2, dtype=torch.float64)
    channels = errors(one * 1e-200, one * 0, channel_axis=0).channels
    assert math.isnan(channels.mse[0])
    assert math.isnan(channels.sqnr_db[0])
    assert channels.max_abs[0] == 1e-200


def test_views_of_nothing_but_zeros() -> None:
    zero, one = torch.zeros(2, 3), torch.tensor([[0.0] * 3, [1.0] * 3])
    channels = errors(zero, zero, channel_axis=0).channels
    assert channels.mse.tolist() == channels.relative_mse.tolist() == [0.0, 0.0]
    assert channels.sqnr_db.tolist() == [INF, INF]
    channels = errors(one, zero, channel_axis=0).channels
    assert channels.relative_mse.tolist() == [0.0, INF]
    assert channels.sqnr_db.tolist() == [INF, -INF]


def test_views_merge_index_by_index() -> None:
    generator = torch.Generator().manual_seed(6)
    actual, reference = torch.randn(2, 90, 1000, generator=generator)
    actual[3, 4] = NAN
    whole = errors(actual, reference, channel_axis=1).channels
    parts = [errors(actual[i : i + 30], reference[i : i + 30], channel_axis=1) for i in (0, 30, 60)]
    for merged in ((parts[0] + parts[1]) + parts[2], parts[2] + (parts[1] + parts[0])):
        view = merged.channels
        assert view.count.tolist() == whole.count.tolist()
        assert view.non_finite.tolist() == whole.non_finite.tolist()
        for name in ("mse", "mae", "sqnr_db", "relative_mse", "max_abs"):
            np.testing.assert_allclose(getattr(view, name), getattr(whole, name), rtol=1e-12)
    with pytest.raises(QgateError, match="1000 and one of 90"):
        parts[0] + errors(actual, reference, channel_axis=0)
    with pytest.raises(QgateError, match="only one side was made with channel_axis"):
        parts[0] + errors(actual, reference)


@settings(max_examples=25)
@given(st.integers(0, 3), st.lists(st.integers(1, 6), min_size=4, max_size=4), st.integers(1, 5))
def test_views_of_any_shape(axis: int, sizes: list[int], step: int) -> None:
    """Portions are cut at any place of any axis: here by reading from the middle of a tensor."""
    shape = [*sizes]
    shape[axis] *= 900 * step // math.prod(sizes) + 1
    generator = torch.Generator().manual_seed(step)
    reference = torch.randn(*shape, ELEMENTS // 3000, generator=generator)
    actual = reference + 1
    channels = errors(actual, reference, channel_axis=axis).channels
    np.testing.assert_allclose(channels.mse, per_index(actual, reference, axis)["mse"], rtol=1e-12)
