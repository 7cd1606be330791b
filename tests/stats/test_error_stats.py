"""`errors` against float64 brute force, scipy and torch, on every kind of input it takes."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.stats._portion import ELEMENTS
from qgate.stats.error_stats import ErrorStats, NonFinite, errors
from qgate.stats.metrics import METRICS
from tests.stats.exact import agree, exact_metrics

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LARGE = 2 * ELEMENTS + 1234


@functools.cache
def pair(size: int = LARGE, seed: int = 0, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(size, generator=generator)
    return reference + noise * torch.randn(size, generator=generator), reference


def brute_force(actual: Tensor, reference: Tensor) -> dict[str, float]:
    a, r = actual.double().numpy().ravel(), reference.double().numpy().ravel()
    e = a - r
    mse, mae = np.mean(e**2), np.mean(np.abs(e))
    return {
        "sqnr_db": 10 * np.log10(np.sum(r**2) / np.sum(e**2)),
        "mse": mse,
        "rmse": np.sqrt(mse),
        "mae": mae,
        "max_abs": np.abs(e).max(),
        "mean_error": np.mean(e),
        "relative_mse": mse / np.mean(r**2),
        "relative_mae": mae / np.mean(np.abs(r)),
        "relative_error": 100 * mae / np.mean(np.abs(r)),
        "cosine": torch.cosine_similarity(
            actual.double().flatten(), reference.double().flatten(), dim=0, eps=0
        ).item(),
        "correlation": scipy.stats.pearsonr(a, r).statistic,
        "psnr_db": 20 * np.log10(np.abs(r).max() / np.sqrt(mse)),
    }


def same(one: ErrorStats, other: ErrorStats, *, indexed: bool = True) -> None:
    """To the last bit, NaN included."""
    shown = [each.to_dict() for each in (one, other)]
    for record in () if indexed else shown:
        for element in record["worst"]:
            del element["index"]
    assert repr(shown[0]) == repr(shown[1])


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_every_mixture_of_dtypes_against_brute_force(dtypes: tuple[torch.dtype, ...]) -> None:
    actual, reference = (x.to(dtype) for x, dtype in zip(pair(), dtypes, strict=True))
    found = errors(actual, reference)
    agree(found.metrics(), brute_force(actual, reference), 1e-12)
    a, r = actual.double(), reference.double()
    assert found.elements == found.sums.count == LARGE
    assert found.metric("max_abs") == (a - r).abs().max().item()
    assert found.sign_flips == ((a < 0) & (r > 0) | (a > 0) & (r < 0)).sum().item() > 100


@pytest.mark.parametrize("size", [2, 3, 1000, 1024, 1025, 3000])
def test_small_tensors_against_exact_arithmetic(size: int) -> None:
    actual, reference = pair(size)
    agree(errors(actual, reference).metrics(), exact_metrics(actual, reference), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_correlation_where_the_mean_is_far_above_the_spread(dtype: torch.dtype) -> None:
    """The usual sums of squares have no correct digit here."""
    actual, reference = ((x.double() + 1e6).to(dtype) for x in pair(noise=1.0))
    actual[: LARGE // 2] -= 1  # the portions do not share a mean
    expected = exact_metrics(actual, reference)["correlation"]
    assert 0.5 < expected < 0.8
    assert errors(actual, reference).metric("correlation") == pytest.approx(expected, rel=1e-12)
    a, r = actual.double() * 1e3, reference.double() * 1e3
    assert errors(a, r).metric("correlation") == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("place", [0, 40_000, LARGE - 1])
def test_one_value_that_is_not_finite(bad: float, side: int, place: int) -> None:
    tensors = [x.clone() for x in pair()]
    tensors[side][place] = bad
    found = errors(*tensors)
    kinds = NonFinite(int(math.isnan(bad)), int(bad == INF), int(bad == -INF))
    assert found.actual_non_finite == (kinds if side == 0 else NonFinite())
    assert found.reference_non_finite == (kinds if side == 1 else NonFinite())
    assert found.mismatched == 1
    assert found.elements == LARGE == found.sums.count + 1
    assert not found.finite
    assert all(math.isnan(value) for value in found.metrics().values())
    assert all(math.isnan(value) for value in found.percentiles().values())
    first = found.first_non_finite
    assert first is not None
    assert first.index == (first.flat,) == (place,)
    assert repr((first.actual, first.reference)) == repr(tuple(x[place].item() for x in tensors))
    kept = [torch.cat([x[:place], x[place + 1 :]]) for x in pair()]
    agree(found.metrics(finite_only=True), errors(*kept).metrics(), 1e-12)
    assert found.percentiles(finite_only=True) == errors(*kept).percentiles()
    assert found.sign_flips == errors(*kept).sign_flips


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_by_kind_side_and_place(dtype: torch.dtype) -> None:
    values = [1.0, 0.0, NAN, INF, -INF]
    met = list(itertools.product(values, values))
    actual, reference = torch.tensor(met, dtype=dtype).T
    found = errors(actual, reference)
    assert found.actual_non_finite == found.reference_non_finite == NonFinite(5, 5, 5)
    assert found.mismatched == 25 - 4 - 3
    assert found.elements == 25
    assert found.sums.count == 4
    assert found.metric("mse", finite_only=True) == 0.5
    assert len(found.worst) == 2


def test_infinities_that_meet_are_no_agreement() -> None:
    for bad in (INF, -INF, NAN):
        found = errors(torch.tensor([1.0, bad]), torch.tensor([1.0, bad]))
        assert found.mismatched == 0
        assert found.actual_non_finite.total == found.reference_non_finite.total == 1
        assert math.isnan(found.metric("mse"))
        assert not found.metric("sqnr_db") >= -INF
        assert found.metric("mse", finite_only=True) == 0.0
    nothing = errors(torch.tensor([NAN]), torch.tensor([1.0]))
    assert math.isnan(nothing.metric("mse", finite_only=True))
    assert math.isnan(nothing.percentile(50, finite_only=True))


def test_mismatched_portions_full_of_nan() -> None:
    actual, reference = (x.clone() for x in pair())
    actual[1000 : ELEMENTS + 5000] = NAN
    reference[500:1500] = -INF
    kept = torch.isfinite(actual) & torch.isfinite(reference)
    found = errors(actual, reference)
    assert found.sums.count == kept.sum().item()
    agree(found.metrics(finite_only=True), brute_force(actual[kept], reference[kept]), 1e-12)


@pytest.mark.parametrize(
    "sizes",
    [[LARGE], [1] * 50 + [LARGE - 50], [ELEMENTS + 1, ELEMENTS, 1233], [0, LARGE, 0]],
    ids=str,
)
def test_chunks_give_what_the_tensor_gives(sizes: list[int]) -> None:
    actual, reference = (x.clone() for x in pair())
    actual[77] = NAN
    whole = errors(actual, reference)
    same(whole, errors(actual.split(sizes), (x for x in reference.split(1000))))
    same(whole, errors(iter([actual.view(-1, 2)]), list(reference.split(sizes))))


def test_chunks_of_any_dtype() -> None:
    actual, reference = pair(100)
    mixed = [actual[:50].bfloat16(), actual[50:].double()]
    whole = torch.cat([x.float() for x in mixed])
    same(errors(mixed, [reference]), errors([whole[:50], whole[50:]], [reference]))


def test_a_stream_is_read_one_chunk_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def chunks() -> Iterator[Tensor]:
        nonlocal most
        for i in range(20):
            gc.collect()
            most = max(most, sum(each() is not None for each in alive))
            chunk = torch.full((ELEMENTS // 3,), float(i))
            alive.append(weakref.ref(chunk))
            yield chunk
            del chunk

    assert errors(chunks(), (chunk + 1 for chunk in chunks())).metric("mse") == 1.0
    assert len(alive) == 40
    assert most <= 4


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    actual, reference = (x[: 60 * 40 * 30].clone() for x in pair(80_000))
    a3, r3 = actual.view(60, 40, 30), reference.view(60, 40, 30)
    return {
        "transposed": (a3[0].T, r3[0].T),
        "permuted": (a3.permute(2, 0, 1), r3.permute(2, 0, 1)),
        "one side": (a3.permute(1, 2, 0), r3.permute(1, 2, 0).contiguous()),
        "every third": (actual[::3], reference[::3]),
        "long rows": (a3.view(2, -1)[:, ::2].expand(3, 2, -1), r3.view(2, -1)[:, ::2].expand(3, 2, -1)),
        "wide": (a3.reshape(2, -1).T, r3.reshape(2, -1).T),
        "flipped": (a3.flip(1), r3.flip(1)[..., :]),
        "expanded": (a3[:, :1].expand(-1, 50, -1), r3[:, :1].expand(-1, 50, -1)),
        "sliced": (a3[3:, 2:17, ::2], r3[3:, 2:17, ::2]),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(layouts()))
def test_any_layout(name: str) -> None:
    actual, reference = layouts()[name]
    copied = errors(actual.contiguous(), reference.contiguous())
    same(errors(actual, reference), copied)
    for element in copied.worst:
        assert actual[element.index].item() == element.actual
        assert reference[element.index].item() == element.reference


def test_scalars_and_empty_tensors() -> None:
    found = errors(torch.tensor(3.0), torch.tensor(1.0))
    assert found.elements == 1
    assert found.metric("mse") == 4.0
    assert [each.index for each in found.worst] == [()]
    for shape in ((0,), (3, 0), (0, 5, 2)):
        empty = errors(torch.empty(shape), torch.empty(shape), channel_axis=0)
        assert empty.elements == 0
        assert all(math.isnan(value) for value in empty.metrics().values())
        assert math.isnan(empty.percentile(50))
        assert empty.worst == ()
        assert math.isnan((empty + empty).metric("mse"))
    same(errors([], []), errors(torch.empty(0), torch.empty(0)))


def test_arguments_are_never_written_to(tmp_path: Path) -> None:
    """The second pair is mapped read-only: writing to it would end the process."""
    actual, reference = (x.clone() for x in pair())
    actual[5], reference[7] = NAN, INF
    before = [x.clone().view(torch.int32) for x in (actual, reference)]
    errors(actual, reference, channel_axis=0)
    assert all(torch.equal(x.view(torch.int32), y) for x, y in zip((actual, reference), before, strict=True))  # fmt: skip
    mapped = []
    for name, x in (("a", actual), ("r", reference)):
        path = tmp_path / name
        path.write_bytes(x.double().numpy().tobytes())
        mapped.append(torch.from_file(str(path), shared=False, size=LARGE, dtype=torch.float64))
    same(errors(*mapped), errors(actual.double(), reference.double()))
    assert (tmp_path / "a").read_bytes() == actual.double().numpy().tobytes()


def test_gradients_are_left_alone() -> None:
    actual, reference = pair(100)
    parameter = torch.nn.Parameter(actual.clone())
    same(errors(parameter, reference), errors(actual, reference))
    assert parameter.grad is None


def test_the_number_of_threads_does_not_matter() -> None:
    actual, reference = (x.view(-1, 2) for x in pair(2 * LARGE))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(errors(actual, reference, channel_axis=1, token_axis=0))
    finally:
        torch.set_num_threads(before)
    same(found[0], found[1])
    same(found[0], found[2])


def slowly_worst(actual: Tensor, reference: Tensor, k: int) -> list[int]:
    size = (actual.double() - reference.double()).abs().numpy().ravel()
    order = np.argsort(-size, kind="stable")[:k]
    return [int(i) for i in order if size[i] > 0]


def inputs_for_worst() -> dict[str, tuple[Tensor, Tensor]]:
    count = 3 * ELEMENTS
    zeros, ramp = torch.zeros(count), torch.arange(count).float()
    few = zeros.clone()
    few[[5, 40_000, 90_000]] = torch.tensor([1.0, -2.0, 1.0])
    coarse = (pair()[0] * 4).round() / 4
    return {
        "noise": pair(),
        "ties": (coarse, torch.zeros(LARGE)),
        "constant": (zeros + 1, zeros),
        "increasing": (ramp, zeros),
        "decreasing": (-ramp.flip(0), zeros),
        "few": (few, zeros),
        "none": (zeros, zeros),
    }


@pytest.mark.parametrize("name", list(inputs_for_worst()))
@pytest.mark.parametrize("k", [0, 1, 10, 1000])
def test_the_worst_elements(name: str, k: int) -> None:
    actual, reference = inputs_for_worst()[name]
    found = errors(actual, reference, worst=k).worst
    assert [each.flat for each in found] == slowly_worst(actual, reference, k)
    for each in found:
        assert each.actual == actual[each.flat]
        assert each.difference == actual[each.flat].double() - reference[each.flat].double()


DIFFERENCES: dict[str, Any] = {
    "normal": lambda g: g.normal(size=LARGE),
    "wide": lambda g: np.exp2(g.uniform(-140, 120, size=LARGE)),
    "float64": lambda g: 10.0 ** g.uniform(-300, 300, size=LARGE),
    "half zero": lambda g: np.maximum(g.normal(size=LARGE), 0),
    "steps": lambda g: g.integers(0, 4, size=LARGE) / 8,
    "constant": lambda _: np.full(LARGE, 0.3),
    "few": lambda g: g.normal(size=3),
    "bin edges": lambda g: 1 + g.integers(0, 512, size=LARGE) / 256,
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_percentiles_within_the_stated_error(name: str) -> None:
    differences = torch.from_numpy(DIFFERENCES[name](np.random.default_rng(4)))
    found = errors(differences, torch.zeros_like(differences))
    assert found.percentile_error == 2**-8
    for q in (0, 0.1, 1, 5, 25, 49.9, 50, 75, 90, 95, 99, 99.9, 100):
        expected = np.percentile(differences.abs().numpy(), q, method="inverted_cdf")
        assert abs(found.percentile(q) - expected) <= 2**-8 * expected, q
    assert found.percentile(100) == found.metric("max_abs")
    assert found.percentiles() == {f"p{q}": found.percentile(q) for q in (50, 90, 95, 99)}


def test_ranks_are_counted_exactly() -> None:
    """100 * (99.9 / 100) * 10 in float64 is not 999."""
    ramp = 2.0 ** torch.arange(1000, dtype=torch.float64).sub_(500)
    found = errors(ramp, torch.zeros_like(ramp))
    for q in (0.1, 7.3, 58.1, 99.9):
        assert found.percentile(q) == pytest.approx(ramp[round(q * 10) - 1].item(), rel=2**-8)


def test_plain_data_and_text() -> None:
    actual, reference = (x.view(100, 10).clone() for x in pair(1000))
    found = errors(actual, reference, channel_axis=1, token_axis=0)
    record = json.loads(json.dumps(found.to_dict()))
    assert record["metrics"] == found.metrics()
    assert record["worst"][0]["index"] == list(found.worst[0].index)
    assert len(record["channels"]["mse"]) == 10
    assert len(record["tokens"]["mse"]) == 100
    text = str(found)
    assert all(metric.label in text for metric in METRICS)
    assert "worst at" in text
    assert "not finite" not in text
    actual[3, 4] = NAN
    text = str(errors(actual, reference))
    assert "not finite, actual: 1 NaN, 0 +Inf, 0 -Inf" in text
    assert "[3, 4]: nan instead of" in text


@pytest.mark.parametrize("bad", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_on_either_side(bad: torch.dtype) -> None:
    good = torch.zeros(4)
    for args in ((good.to(bad), good), (good, good.to(bad)), ([good.to(bad)], [good])):
        with pytest.raises(TypeError, match=str(bad)):
            errors(*args)


@pytest.mark.parametrize(
    "bad", [1.0, None, "abc", [1.0, 2.0], np.zeros(4), np.zeros(0), {"a": torch.zeros(4)}]
)
def test_other_things_are_refused(bad: Any) -> None:
    for args in ((bad, [torch.zeros(4)]), ([torch.zeros(4)], bad), (bad, bad)):
        with pytest.raises(TypeError, match="expected a tensor or chunks"):
            errors(*args)
    with pytest.raises(TypeError, match="two tensors"):
        errors(torch.zeros(4), [torch.zeros(4)])
    with pytest.raises(TypeError, match=r"to_dense"):
        errors(torch.zeros(4).to_sparse(), torch.zeros(4))


def test_nothing_is_broadcast() -> None:
    for one, other in (((3, 1), (3, 4)), ((4,), (1, 4)), ((), (1,)), ((2, 3), (3, 2))):
        with pytest.raises(QgateError) as caught:
            errors(torch.zeros(one), torch.zeros(other))
        assert str(one) in str(caught.value)
        assert str(other) in str(caught.value)


@pytest.mark.parametrize("extra", [1, ELEMENTS, 3 * ELEMENTS])
@pytest.mark.parametrize("size", [5, ELEMENTS])
def test_chunks_of_different_length_are_refused(extra: int, size: int) -> None:
    short, long = [torch.zeros(size)], [torch.zeros(size), torch.zeros(extra)]
    with pytest.raises(QgateError, match=f"actual has {size} .*reference {size + extra}:"):
        errors(short, long)
    with pytest.raises(QgateError, match=f"actual has {size + extra} .*reference {size}:"):
        errors(long, short)


def test_options_that_make_no_sense() -> None:
    x = torch.zeros(2, 3)
    for axis in (2, -3):
        with pytest.raises(QgateError, match=rf"{axis} .*\(2, 3\)"):
            errors(x, x, channel_axis=axis)
    with pytest.raises(QgateError, match="need tensors"):
        errors([x], [x], token_axis=0)
    with pytest.raises(QgateError, match="worst=-1"):
        errors(x, x, worst=-1)
    with pytest.raises(QgateError, match="101"):
        errors(x, x).percentile(101)
    with pytest.raises(QgateError, match="Did you mean sqnr_db"):
        errors(x, x).metric("sqnr")
