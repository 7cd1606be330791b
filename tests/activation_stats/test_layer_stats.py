"""Statistics of activations against a computation that keeps all of them, and planted outliers."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
import torch
from torch import Tensor

from qgate.activation_stats import _ranges
from qgate.activation_stats import _tensor_pass as _reading
from qgate.activation_stats._ranges import ERROR, PERCENTILES, ChannelCounts
from qgate.activation_stats._rows import RowShare
from qgate.activation_stats._tensor_pass import TensorReading
from qgate.activation_stats.layer_stats import LayerRequest, LayerStats, OutlierRule
from qgate.activation_stats.reading import losses
from qgate.errors import QgateError
from qgate.formats import quantize
from qgate.stats.moments import ExactSum
from tests.activation_stats.layer_records import record_of, stats_of
from tests.shares import proof

RULE = OutlierRule()
ALL = LayerRequest(
    reduced=("token", "channel", "all"),
    outliers=RULE,
    percentiles=PERCENTILES,
    formats=("int8", "fp8_e4m3", "mxfp4_e2m1"),
    bins=50,
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def samples(
    count: int = 5, tokens: int = 37, width: int = 24, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    g = torch.Generator().manual_seed(count + width)
    channel = torch.randn(width, generator=g).exp()
    tensors = [torch.randn(1, tokens + k, width, generator=g) * channel for k in range(count)]
    return [x.to(dtype) for x in tensors]


def tables(xs: list[Tensor]) -> list[npt.NDArray[np.float64]]:
    return [x.reshape(-1, x.shape[-1]).double().numpy() for x in xs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_figures_equal_those_of_a_computation_that_keeps_everything(dtype: torch.dtype) -> None:
    xs = samples(dtype=dtype)
    record = record_of(xs, ALL)
    every = np.concatenate(tables(xs))
    summary = record["portrait"]
    exact = {"min": every.min(), "max": every.max(), "amax": np.abs(every).max()}
    exact["amin"] = np.abs(every)[every != 0].min()
    assert {k: summary[k] for k in exact} == exact  # type: ignore[literal-required]
    flat = every.reshape(-1)
    moments = {"mean": flat.mean(), "std": flat.std(), "rms": np.sqrt((flat**2).mean())}
    moments |= {"skew": scipy.stats.skew(flat), "kurtosis": scipy.stats.kurtosis(flat)}
    for name, value in moments.items():
        assert summary[name] == pytest.approx(value, rel=1e-11, abs=1e-13)  # type: ignore[literal-required]
    assert summary["elements"] == every.size
    assert (record["tokens"], record["samples"], record["coverage"]) == (len(every), 5, 1)
    assert sum(record["histogram"]["counts"]) == every.size
    vectors: dict[str, Any] = {
        "token": [np.abs(x).max(1) for x in tables(xs)],
        "channel": [np.abs(x).max(0) for x in tables(xs)],
        "all": [np.abs(x).reshape(-1) for x in tables(xs)],
    }
    for name, vs in vectors.items():
        ordered = [np.sort(v) for v in vs]
        got = record["magnitude"][name]
        assert got["top"] == pytest.approx(np.mean([v[::-1][:3] for v in ordered], 0).tolist())
        assert got["low"] == pytest.approx(np.mean([v[:3] for v in ordered], 0).tolist())
        median = np.mean([v[(len(v) - 1) // 2] for v in ordered])
        assert got["median"] == pytest.approx(median, rel=2**-8 if name == "all" else 1e-12)
        assert got["most"] == max(v[-1] for v in ordered)


def test_outlier_tokens_are_those_of_float32_with_the_lower_median() -> None:
    xs = samples(tokens=40)
    xs[2][0, 7, 3] = 5e4
    xs[2][0, 9, 5] = -6e4
    xs[4][0, 7, 3] = 7e4
    outliers = record_of(xs, ALL)["outliers"]
    counts = []
    for x in tables(xs):
        t = np.abs(x).max(1).astype(np.float32)
        m = np.sort(t)[::-1][len(t) // 2]
        counts.append(int((t / m > 64).sum()))
    assert outliers["counts"] == counts == [0, 0, 2, 0, 1]
    assert outliers["positions"] == {"7": 2, "9": 1}
    assert {(t["sample"], t["position"], t["channel"], t["value"]) for t in outliers["tokens"]} == {
        (2, 7, 3, 5e4),
        (2, 9, 5, -6e4),
        (4, 7, 3, 7e4),
    }


def test_count_position_and_token_follow_one_rule_also_in_bfloat16() -> None:
    x = torch.full((1, 8, 4), 1.0078125, dtype=torch.bfloat16)
    x[0, 5, 2] = 101
    outliers = record_of([x], LayerRequest(outliers=OutlierRule(threshold=100)))["outliers"]
    assert outliers["counts"] == [1]
    assert outliers["positions"] == {"5": 1}
    assert [t["position"] for t in outliers["tokens"]] == [5]
    assert record_of([x], LayerRequest(outliers=OutlierRule(threshold=1e6)))["outliers"][
        "counts"
    ] == [0]
    assert OutlierRule().threshold == 64


def test_a_token_is_named_by_its_own_text() -> None:
    """Not by the first of its sample: ` niz` at position 37."""
    xs = [torch.randn(1, 60, 16) for _ in range(4)]
    stats = LayerStats("m", "output", ALL)
    for k, x in enumerate(xs):
        x[0, 37, 5] = 4000
        stats.update(x, k, tokens=[1997 if p == 37 else p for p in range(60)])
    texts = lambda ids: [" niz" if i == 1997 else "ia" for i in ids]  # noqa: E731
    outliers = stats.record(0, "linear", 4, texts)["outliers"]
    assert [(t["position"], t["text"]) for t in outliers["tokens"]] == [(37, " niz")] * 4
    assert outliers["texts"] == {" niz": 4}


def test_a_median_of_zero_is_undefined_and_the_floor_is_absolute() -> None:
    x = torch.zeros(1, 9, 4)
    x[0, 3, 1] = 0.001
    outliers = record_of([x], ALL)["outliers"]
    assert (outliers["undefined"], outliers["counts"]) == (1, [0])
    assert "token_ratio" not in outliers
    y = torch.full((1, 9, 4), 1e-9)
    y[0, 3, 1] = 0.001
    assert record_of([y], ALL)["outliers"]["counts"] == [1]
    floor = LayerRequest(outliers=OutlierRule(floor=0.01))
    assert record_of([y], floor)["outliers"]["counts"] == [0]


def test_all_values_have_their_own_top_median_and_minimum() -> None:
    x = torch.tensor([[[0.611, -0.576], [0.568, 0.02], [1.7e-7, 0.018]]])
    got = record_of([x], ALL)["magnitude"]["all"]
    assert got["top"] == pytest.approx([0.611, 0.576, 0.568])
    assert got["median"] == pytest.approx(0.02, rel=2**-8)
    assert got["low"] == pytest.approx([1.7e-7, 0.018, 0.02])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_counted_and_the_rest_is_still_right(dtype: torch.dtype) -> None:
    xs = samples(dtype=dtype)
    xs[1][0, 4, :] = math.nan
    xs[1][0, 5, 2] = math.inf
    xs[2][0, 6, 3] = -math.inf
    record = record_of(xs, ALL)
    summary = record["portrait"]
    assert [summary[k] for k in ("nan", "posinf", "neginf")] == [24, 1, 1]  # type: ignore[literal-required]
    every = np.concatenate(tables(xs))
    finite = every[np.isfinite(every)]
    assert (summary["min"], summary["max"]) == (finite.min(), finite.max())
    assert summary["rms"] == pytest.approx(math.sqrt((finite**2).mean()), rel=1e-5)
    assert record["magnitude"]["token"]["most"] == np.abs(finite).max()


def test_a_tensor_of_nan_has_counts_and_no_figures() -> None:
    record = record_of([torch.full((1, 3, 4), math.nan)], ALL)
    assert record["portrait"]["nan"] == 12
    assert "max" not in record["portrait"]


def test_a_module_called_twice_keeps_the_larger_call() -> None:
    stats = LayerStats("m", "output", ALL)
    stats.update(torch.full((1, 5, 4), 100.0), 0)
    stats.update(torch.ones(1, 5, 4), 0)
    record = stats.record(0, "other", 1)
    assert record["magnitude"]["token"]["top"] == [100, 100, 100]
    assert (record["calls"], record["samples"], record["tokens"]) == (2, 1, 10)
    assert record["outliers"]["counts"] == [5]
    assert [t["value"] for t in record["outliers"]["tokens"]] == [100] * 5


def test_an_expert_that_half_the_samples_reach_is_no_mean_with_zeros() -> None:
    stats = LayerStats("experts.1", "output", ALL)
    stats.update(torch.full((7, 4), 10.0), 1)
    record = stats.record(1, "other", 2)
    assert record["magnitude"]["token"]["top"][0] == 10
    assert (record["samples"], record["coverage"]) == (1, 0.5)


def planted(kind: str) -> list[Tensor]:
    xs = [torch.randn(1, 64, 48, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    for x in xs:
        if kind == "channel":
            x[..., 11] *= 40
        if kind == "token":
            x[0, 5] *= 400
    if kind == "element":
        xs[1][0, 9, 20] = 3000
    return xs


def test_a_channel_a_token_and_an_element_are_told_apart() -> None:
    by_kind = {
        kind: record_of(planted(kind), ALL)["outliers"] for kind in ("channel", "token", "element")
    }
    channel = by_kind["channel"]
    assert [(c["channel"], c["systematic"]) for c in channel["channels"]] == [(11, True)]
    assert channel["channels"][0]["tokens"] > 0.8
    assert channel["channels"][0]["samples"] == 1
    assert (channel["mean_count"], channel["massive"]) == (0, [])
    token = by_kind["token"]
    assert token["positions"] == {"5": 4}
    assert not any(c["systematic"] for c in token["channels"])
    element = by_kind["element"]
    spot = element["massive"][0]
    assert (spot["sample"], spot["position"], spot["channel"], spot["value"]) == (1, 9, 20, 3000)
    assert len(element["massive"]) == 1
    assert spot["ratio"] > 1000
    assert [(c["channel"], c["systematic"]) for c in element["channels"]] == [(20, False)]
    assert element["counts"] == [0, 1, 0, 0]


def test_a_massive_element_at_each_start_is_not_systematic() -> None:
    xs = planted("")
    for x in xs:
        x[0, 0, 7] = 2000
    outliers = record_of(xs, ALL)["outliers"]
    assert outliers["channels"][0]["channel"] == 7
    assert outliers["channels"][0]["samples"] == 1
    assert not outliers["channels"][0]["systematic"]
    assert len(outliers["massive"]) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_and_parts_of_the_samples_change_nothing(dtype: torch.dtype) -> None:
    xs = samples(8, dtype=dtype)
    xs[3][0, 4, 2] = 9e3
    whole = stats_of(xs, ALL).record(0, "linear", 8)
    shuffled = LayerStats("m", "input", ALL)
    for k in (5, 2, 7, 0, 1, 6, 4, 3):
        shuffled.update(xs[k], k)
    assert shuffled.record(0, "linear", 8) == whole
    parts = [LayerStats("m", "input", ALL) for _ in range(3)]
    for k, x in enumerate(xs):
        parts[k % 3].update(x, k)
    sent = [pickle.loads(pickle.dumps(part)) for part in parts]
    assert (sent[0] + sent[1] + sent[2]).record(0, "linear", 8) == whole
    assert (sent[2] + (sent[1] + sent[0])).record(0, "linear", 8) == whole
    assert [part.record(0, "linear", 8) for part in sent] == [
        part.record(0, "linear", 8) for part in parts
    ]
    for part in parts[1:]:
        parts[0].merge(part)
    assert parts[0].record(0, "linear", 8) == whole


def test_parts_that_cannot_be_written_to_add_up() -> None:
    """As those are that Ray hands over."""
    xs = samples(4)
    parts = [stats_of(xs, ALL), LayerStats("m", "input", ALL)]
    parts[1].update(torch.randn(1, 30, 24), 4)
    right = (parts[0] + parts[1]).record(0, "linear", 5)
    read_only = []
    for part in parts:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(part, 5, buffer_callback=buffers.append)
        read_only.append(pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers]))
    assert not read_only[0].counts._pages.flags.writeable
    assert (read_only[0] + read_only[1]).record(0, "linear", 5) == right


def test_sums_are_exact_in_any_order() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(300) * 10.0 ** rng.integers(-150, 150, 300)
    for some in (values, np.array([5e-324, 1.7e308, -1.7e308]), np.array([])):
        right = float(sum(map(Fraction, some.tolist()), Fraction()))
        one, two, back = ExactSum(), ExactSum(), ExactSum()
        for k, x in enumerate(some.tolist()):
            (one if k % 3 else two).add(x)
        for x in some.tolist()[::-1]:
            back.add(x / 4 if abs(x) > 1e-300 else x, 2 if abs(x) > 1e-300 else 0)
        one.merge(two)
        assert one.value() == back.value() == right


def test_a_large_value_counts_the_same_first_and_last() -> None:
    xs = [torch.full((1, 40, 4), v) for v in (1e-9, 3e-5, 2.0, 900.0, 0.0)]
    ranges = []
    for order in ((0, 1, 2, 3, 4), (3, 2, 4, 1, 0), (4, 0, 3, 1, 2)):
        stats = LayerStats("m", "input", LayerRequest(percentiles=PERCENTILES))
        for k in order:
            stats.update(xs[k], k)
        ranges.append(stats.record(0, "linear", 5)["ranges"])
    assert ranges[0] == ranges[1] == ranges[2]


def test_statistics_of_different_layers_do_not_merge() -> None:
    with pytest.raises(QgateError, match="do not add up"):
        LayerStats("a", "input").merge(LayerStats("b", "input"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absolute", [False, True])
def test_percentiles_of_channels_keep_their_bound(dtype: torch.dtype, absolute: bool) -> None:
    xs = samples(6, 200, 16, dtype)
    request = LayerRequest(percentiles=PERCENTILES, absolute=absolute)
    ranges = record_of(xs, request)["ranges"]
    every = np.concatenate(tables(xs))
    every = np.abs(every) if absolute else every
    for text, values in ranges["percentiles"].items():
        right = np.percentile(every, float(text), axis=0, method="lower")
        if text == "100" or (text == "0" and not absolute):
            assert values == right.tolist()
        bound = ERROR * np.abs(right) + np.abs(every).max() * 2.0**-19
        assert (np.abs(np.array(values) - right) <= bound).all()
    assert len(ranges["percentiles"]["50"]) == 16
    assert ranges["error"] == ERROR


def test_percentiles_merge_and_grow_with_the_largest_value() -> None:
    xs = samples(4, 100, 8)
    xs[1] *= 2000
    xs[3] *= 1e-3
    one, two, whole = ChannelCounts(), ChannelCounts(), ChannelCounts()
    for k, x in enumerate(xs):
        reading = TensorReading.of(x)
        (one if k % 2 else two).add(reading)
        whole.add(reading)
    one.merge(two)
    every = np.concatenate(tables(xs))
    ends = every.min(0), every.max(0)
    for counted in (one, whole):
        counted.settle()
        assert int(counted._table.sum()) == every.size
        right = np.percentile(every, 99, axis=0, method="lower")
        got = np.array(counted.ranges(*ends)["percentiles"]["99"])
        assert np.allclose(got, right, rtol=ERROR)
        assert len(pickle.dumps(counted)) / 8 < 4 * 2 * 16 * 34


@proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_much_is_counted_at_once_changes_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs = [torch.zeros(1, 5, 24, dtype=dtype), *samples(9, 300, dtype=dtype)]
    xs[3][0, 4:7] = math.nan
    xs[5][0, 1, 2] = -math.inf
    xs[6] *= 300
    whole = record_of(xs, ALL)
    with monkeypatch.context() as patch:
        patch.setattr(_ranges, "_ROWS", (7, 7))
        patch.setattr(_ranges, "_PIECE", (1, 3))
        patch.setattr(_ranges, "_PLACES", 1)
        assert record_of(xs, ALL)["ranges"] == whole["ranges"]
    for part, at_once in ((1, 1), (24 * 7, 24 * 100)):
        monkeypatch.setattr(_reading, "_PART", part)
        monkeypatch.setattr(_reading, "_AT_ONCE", at_once)
        parted = record_of(xs, ALL)
        assert parted["ranges"] == whole["ranges"]
        assert parted["magnitude"] == whole["magnitude"]
        assert parted["histogram"] == whole["histogram"]
        for name, value in whole["portrait"].items():
            approximate = isinstance(value, float)
            got = parted["portrait"][name]  # type: ignore[literal-required]
            assert got == (pytest.approx(value, rel=1e-5, abs=1e-6) if approximate else value)


def test_zeros_before_the_first_value_are_zeros_and_take_no_room() -> None:
    xs = [torch.zeros(1, 9, 4), torch.full((1, 3, 4), 2.0), torch.full((1, 3, 4), -3.0)]
    stats = stats_of(xs, LayerRequest(percentiles=PERCENTILES))
    ranges = stats.record(0, "linear", 3)["ranges"]
    assert ranges["percentiles"]["50"] == ranges["percentiles"]["75"] == [0.0] * 4
    assert ranges["percentiles"]["1"] == [pytest.approx(-3, rel=ERROR)] * 4
    assert stats.ranges is not None
    assert len(pickle.dumps(stats.ranges)) / 4 < 4 * 2 * 16 * 24


def test_a_weight_is_reduced_by_its_axis() -> None:
    w = torch.tensor([[1.0, -7.0, 2.0], [4.0, 0.5, 3.0]])
    stats = LayerStats("m", "weight", LayerRequest())
    stats.update(w)
    magnitude = stats.record(0, "linear", 1)["magnitude"]
    assert magnitude["channel"]["top"] == [7, 4, 3]  # by input channel, the last axis
    assert magnitude["token"]["top"] == [7, 4]  # by output


def test_a_heat_map_loses_no_peak() -> None:
    x = torch.rand(1, 512, 1024)
    x[0, 3, 101] = 400
    heat_map = record_of([x], LayerRequest(heat_map=0))["heat_map"]
    assert heat_map["stats"]["min"] == pytest.approx(float(x.abs().min()), rel=1e-6)
    assert max(map(max, heat_map["cells"])) == 400
    assert (len(heat_map["cells"]), len(heat_map["cells"][0])) == (96, 160)
    assert (heat_map["tokens"], heat_map["channels"]) == (512, 1024)
    assert heat_map["stats"]["max"] == 400
    assert heat_map["stats"]["mean"] == pytest.approx(float(x.mean()), rel=1e-5)
    exact = np.percentile(x.numpy(), 99, method="lower")
    assert heat_map["stats"]["p99"] == pytest.approx(float(exact), rel=1e-7)
    assert heat_map["stats"]["beyond_3_std"] == 1


def test_formats_are_those_of_the_values() -> None:
    xs = samples(3, dtype=torch.bfloat16)
    outcome = record_of(xs, ALL)["portrait"]["formats"]
    every = torch.cat([x.reshape(-1) for x in xs]).double()
    cast = every.to(torch.float8_e4m3fn).double()
    assert list(outcome) == ["int8 per tensor", "fp8_e4m3 per tensor", "mxfp4_e2m1"]
    assert outcome["fp8_e4m3 per tensor"]["noise"] == pytest.approx(
        float((cast - every).square().sum())
    )
    assert outcome["fp8_e4m3 per tensor"]["signal"] == pytest.approx(float(every.square().sum()))
    assert outcome["mxfp4_e2m1"]["of"] == every.numel()


def test_memory_does_not_grow_with_samples() -> None:
    def size(count: int) -> int:
        stats = LayerStats(
            "m", "input", LayerRequest(outliers=RULE, formats=("int8",), rows=16, share=2**10)
        )
        g = torch.Generator().manual_seed(0)
        for k in range(count):
            stats.update(torch.randn(1, 64, 32, generator=g), k)
        stats.finish()
        return len(pickle.dumps(stats))

    assert size(60) < 1.2 * size(10)


def shared(tables: Sequence[Tensor], order: Sequence[int], seed: int = 1) -> RowShare:
    share = RowShare(20, seed=seed)
    for k in order:
        share.add(tables[k], tables[k].abs().amax(1).double().numpy(), k, 0)
    return share


def test_a_share_of_rows_is_the_same_in_any_order() -> None:
    tables = [torch.randn(50, 4) * 10 ** torch.randn(50, 1) for _ in range(6)]
    a, b = shared(tables, range(6)), shared(tables, range(5, -1, -1))
    rows = a.rows()
    assert rows is not None
    assert len(rows) == 20
    assert torch.equal(rows, b.rows())  # type: ignore[arg-type]
    merged = shared(tables, [4, 1])
    merged.merge(shared(tables, [0, 5, 2, 3]))
    for other in (b, merged):
        assert (other.counts == a.counts).all()
        for (x, of), (y, expected) in zip(other.sample(9).kinds, a.sample(9).kinds, strict=True):
            assert of == expected
            assert torch.equal(x, y)
    c, first = shared(tables, [0], seed=2), shared(tables, [0])
    assert c.rows() is not None
    assert not torch.equal(c.rows(), first.rows())  # type: ignore[arg-type]


def test_a_sample_has_rows_of_every_magnitude_that_stand_for_all() -> None:
    tables = [torch.randn(500, 8) for _ in range(4)]
    tables[2][77] *= 1000
    tables[3][5] = 0
    sample = shared(tables, range(4)).sample(20)
    assert (sample.of, sample.rows < 60) == (2000, True)
    wild = [(len(rows), of) for rows, of in sample.kinds if float(rows.abs().max()) > 100]
    assert wild == [(1, 1)], "a wild row stands for itself"
    few = shared([tables[0][:15]], [0])
    assert [of for _, of in few.sample(20).kinds] == [15], "all rows are one kind"


@pytest.mark.parametrize("wild", [0, 2, 40])
def test_errors_of_a_sample_are_those_of_all_tokens(wild: int) -> None:
    """Two wild tokens of 4,000 were in no sample, or counted as two of sixteen."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 256, generator=g)
    x[torch.randperm(4000, generator=g)[:wild]] *= 300
    names = ("int8", "mxfp4", "nvfp4", "mxfp8", "fp8_e4m3")
    stats = LayerStats("m", "input", LayerRequest(formats=names, share=2**12))
    for k, part in enumerate(x.split(500)):
        stats.update(part, k)
    layer = stats.record(None, "linear", 8)
    losses_by_name = losses(layer)
    for name, loss in zip(names, losses_by_name.values(), strict=True):
        options = {"granularity": "tensor"} if name == "int8" else {}
        if name != "fp8_e4m3":
            noise = (quantize(x, name, **options) - x).double().square().sum()  # type: ignore[arg-type]
            expected_db = 10 * math.log10(float(x.double().square().sum() / noise))
            assert loss.sqnr_db == pytest.approx(expected_db, abs=0.5), name
        assert re.fullmatch(r"of \d\d of 4,000 tokens", loss.sampled)
        assert loss.sampled in str(loss)


def test_edges_of_the_range_keep_their_sums() -> None:
    for scale in (1e-30, 1e30):
        x = torch.randn(1, 20, 8) * scale
        assert record_of([x], ALL)["portrait"]["rms"] == pytest.approx(
            float(x.double().square().mean().sqrt()), rel=1e-5
        )


def test_integers_and_wrong_ids_are_refused() -> None:
    with pytest.raises(QgateError, match="floating point"):
        LayerStats("m", "input").update(torch.ones(3, 4, dtype=torch.long))
    with pytest.raises(QgateError, match="3 tokens flow"):
        LayerStats("m", "input").update(torch.ones(3, 4), 0, tokens=[1, 2])
    with pytest.raises(QgateError, match=r"outlier\.threshold"):
        OutlierRule(threshold=math.nan)
