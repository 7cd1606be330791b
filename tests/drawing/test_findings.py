"""What a drawing says of healthy and of broken dumps, and that it names every tensor."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.charts.sheet import Sheet
from qgate.drawing.compute import DrawingRequest, analyze_dump
from qgate.drawing.findings import findings_of, worst_tensors
from qgate.drawing.page import page
from qgate.drawing.plots.pictures import PICTURES, picture_at
from qgate.drawing.texts import tensor_stats
from qgate.dumps import DumpWriter
from qgate.formats import quantize
from qgate.summaries.reading import (
    is_quantized,
    outcome_of,
    ratios_db,
    row_titles,
    saturation_cost,
    tensor_title,
)
from qgate.summaries.record import DumpAnalysis
from tests.drawing import dump_records
from tests.dumps.making import GENERATIONS, known, record
from tests.shares import share

FORMATS = ("fp8_e4m3", "fp16", "mxfp4_e2m1", "int8")
SITES = (
    ("attention", "attn", "forward", "pre", "query", 1.0),
    ("linear", "attn.q", "forward", "pre", "input", 1.0),
    ("linear", "attn.k", "forward", "pre", "input", 1.0),
    ("linear", "attn.k", "forward", "pre", "weight", 0.05),
    ("linear", "attn.k", "backward", "post", "grad_input", 1e-3),
)
Change = Callable[[Any, Tensor], Tensor]


def sheet_of(path: str, analysis: DumpAnalysis) -> Sheet:
    sheet = picture_at(f"{path}.png").draw.build(analysis)
    assert sheet is not None
    return sheet


def write(folder: Path, change: Change = lambda _, x: x, ranks: int = 3, samples: int = 2) -> Path:
    """Ranks that see other data, samples, two layers whose linears share their names."""
    for rank in range(ranks):
        with DumpWriter(folder, rank=rank, world_size=ranks) as writer:
            order = 0
            for sample in range(samples):
                for layer in range(2):
                    for site, (kind, module, operation, phase, name, size) in enumerate(SITES):
                        new_record = record(
                            order, layer_type=kind, operation=operation, phase=phase, name=name,
                            layer=layer, module=f"model.layers.{layer}.{module}", rank=rank,
                            world_size=ranks, sample=sample, micro_batch=sample, call=sample,
                        )  # fmt: skip
                        seed = (site, layer) if name == "weight" else (site, layer, rank, sample)
                        random = np.random.default_rng(seed)
                        x = torch.from_numpy(size * random.normal(size=(48, 32))).bfloat16()
                        writer.add(new_record, change(new_record, x))
                        order += 1
    return folder


def plant(told: Any, x: Tensor) -> Tensor:
    key = told.rank, told.layer, told.module.rpartition(".")[2], told.name, told.sample
    x = x.clone()
    if key == (1, 1, "q", "input", 0):
        x[3, 4] = math.inf
    if key == (2, 0, "k", "input", 1):
        x[0, 0], x[7, 9] = 600.0, -700.0
    return x


def times(factor: float, **where: int) -> Change:
    """Return a fault: all but the weights of some ranks, layers or samples times a factor."""

    def fault(told: Any, x: Tensor) -> Tensor:
        is_meant = all(getattr(told, name) == value for name, value in where.items())
        return x * factor if is_meant and told.name != "weight" else x

    return fault


def analyzed(folder: Path, formats: tuple[str, ...] = FORMATS) -> DumpAnalysis:
    return analyze_dump(folder, request=DrawingRequest(formats=formats))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> DumpAnalysis:
    return analyzed(write(tmp_path_factory.mktemp("healthy") / "d"))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> DumpAnalysis:
    return analyzed(write(tmp_path_factory.mktemp("planted") / "d", plant))


INFINITE = "L1 model.layers.1.attn.q forward input, rank 1, iteration 0, sample 0"
TOO_LARGE = "L0 model.layers.0.attn.k forward input, rank 2, iteration 0, sample 1"

# Overflow ----------------------------------------------------------------------------------------


def test_a_healthy_dump_says_that_nothing_overflows(healthy: DumpAnalysis) -> None:
    texts = [finding.text for finding in findings_of(healthy).findings]
    (nothing,) = [text for text in texts if "overflows" in text]
    assert nothing == (
        "Nothing overflows: all values of 60 tensors are finite, and cast to fp8_e4m3, fp16, hif8 "
        "none saturates."
    )
    for picture in PICTURES:
        if picture.folder == "overflow_analysis" or picture.path == "heatmaps/saturated.png":
            assert picture.draw.build(healthy) is None
    assert "Nothing overflows: all values are finite" in page(healthy, [], [])
    title = sheet_of("quantization_analysis/saturation", healthy).title
    assert re.match(r"By design mx\w+ owes \d", title)


def test_overflow_leads_every_list(planted: DumpAnalysis) -> None:
    findings = findings_of(planted)
    assert [finding.level for finding in findings.findings[:2]] == ["fail", "warn"]
    assert INFINITE in findings.findings[0].text
    assert TOO_LARGE in findings.findings[1].text
    assert "of its values in fp8_e4m3, >99.9 % of its squared error" in findings.findings[1].text
    titles = [bad.tensor["title"] for bad in worst_tensors(planted, 5)]
    assert titles[:2] == [INFINITE, TOO_LARGE]
    text = tensor_stats(planted).split("Worst tensors")[1]
    assert 0 < text.index(INFINITE) < text.index(TOO_LARGE) < text.index("become zero")
    page_text = page(planted, [], []).replace("<wbr>", "").split("<h2>Worst tensors")[1]
    assert [re.sub("<.*?>", "", row) for row in re.findall("<th scope='row'.*?</th>", page_text)][
        :2
    ] == [INFINITE, TOO_LARGE]
    sheet = sheet_of("overflow_analysis/worst_tensors", planted)
    assert TOO_LARGE in sheet.title
    first, second = [label.get_text() for label in sheet.figure.axes[0].get_yticklabels()][:2]
    assert (first[:20], second[:20]) == (INFINITE[:20], TOO_LARGE[:20])
    assert INFINITE in sheet_of("overflow_analysis/nonfinite", planted).title


def test_blocks_are_never_ranked_by_what_they_saturate(planted: DumpAnalysis) -> None:
    assert all(
        "mxfp4" not in bad.reason or "dB" in bad.reason for bad in worst_tensors(planted, 99)
    )
    for path in ("by_layer_type", "worst_tensors", "share_histogram"):
        sheet = picture_at(f"overflow_analysis/{path}.png").draw.build(planted)
        assert sheet is None or "mxfp4" not in sheet.title


def test_the_cost_of_saturation_is_a_part_of_the_error(tmp_path: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 64)) * 200).bfloat16()
    with DumpWriter(tmp_path / "d") as writer:
        writer.add(record(0), x)
    (tensor,) = analyzed(tmp_path / "d", ("fp8_e4m3", "mxfp4_e2m1"))["tensors"]
    values = x.double().numpy()
    cast = values.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wrong = (cast - values) ** 2
    error_share = wrong[np.abs(values) > 464].sum() / wrong.sum()
    assert saturation_cost(tensor["formats"]["fp8_e4m3"]) == pytest.approx(error_share, rel=1e-9)
    assert 0.5 < error_share < 1
    blocks = values.reshape(-1, 32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)
    over = np.abs(blocks / scale) >= 7
    wrong = (quantize(x, "mxfp4_e2m1").double().numpy().reshape(-1, 32) - blocks) ** 2
    error_share = wrong[over].sum() / wrong.sum()
    assert saturation_cost(tensor["formats"]["mxfp4_e2m1"]) == pytest.approx(error_share, rel=1e-9)
    assert 0.05 < error_share < 0.9


# Massive elements --------------------------------------------------------------------------------


def test_a_format_that_looks_good_because_of_one_element_is_named(tmp_path: Path) -> None:
    def massive(told: Any, x: Tensor) -> Tensor:
        x = x.clone()
        if told.layer == 1 and told.module.endswith("attn.q"):
            x[5, 5] = 3e4
        return x

    analysis = analyzed(write(tmp_path / "d", massive, ranks=1), ("int8",))
    (finding,) = [f for f in findings_of(analysis).findings if "looks good only" in f.text]
    assert finding.level == "warn"
    assert finding.text.startswith(
        "int8 per tensor looks good only because of massive elements in 2 tensors (layer 1): "
        "L1 model.layers.1.attn.q forward input, rank 0"
    )
    tensor = next(t for t in analysis["tensors"] if "layers.1.attn.q" in t["title"])
    whole, remainder = ratios_db(tensor["formats"]["int8"])
    random = np.random.default_rng((1, 1, 0, 0))
    values = torch.from_numpy(random.normal(size=(48, 32))).bfloat16()
    values[5, 5] = 3e4
    x, y = values.double().numpy().ravel(), quantize(values, "int8").double().numpy().ravel()
    ordinary = np.abs(x) < 2e4
    assert whole == pytest.approx(10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()), abs=1e-6)
    ordinary_ratio = 10 * np.log10((x[ordinary] ** 2).sum() / ((y - x)[ordinary] ** 2).sum())
    assert remainder == pytest.approx(ordinary_ratio, abs=1e-6)
    assert whole > remainder + 20
    row = findings_of(analysis).formats[0]
    assert (row.label, row.worst_db[1]) == ("int8 per tensor", pytest.approx(remainder, abs=1))
    (most,) = [f.text for f in findings_of(analysis).findings if "loses most" in f.text]
    assert most.startswith(
        "int8 per tensor loses most: in L1 model.layers.1.attn.q forward input, rank 0"
    )
    told = f"its SQNR is {remainder:.1f} dB without a few massive elements, which alone lift it to "
    assert f"{told}{whole:.1f} dB; " in most
    axes = sheet_of("comparisons/sqnr_by_layer", analysis).figure.axes[0]
    dots = axes.collections[0].get_offsets()[:, 1]
    assert dots.min() == pytest.approx(remainder, abs=1)


# Ranks and samples -------------------------------------------------------------------------------


def test_a_fault_in_one_layer_of_one_rank_is_a_finding(tmp_path: Path) -> None:
    analysis = analyzed(write(tmp_path / "d", times(2, rank=2, layer=1)), ("fp8_e4m3",))
    findings = findings_of(analysis).findings
    (finding,) = [item for item in findings if item.text.startswith("Rank 2 of 3 stands")]
    assert finding.level == "warn"
    assert finding.text.startswith("Rank 2 of 3 stands out in layer 1: ")
    assert not any("No rank" in item.text for item in findings)
    assert "No rank" not in tensor_stats(analysis)
    title = sheet_of("rank_analysis/scores", analysis).title
    assert title.startswith("Rank 2 of 3 stands out in layer 1")


def test_a_rank_of_zeros_has_no_factor_in_digits(tmp_path: Path) -> None:
    analysis = analyzed(write(tmp_path / "d", times(0, rank=2, layer=1)), ("fp8_e4m3",))
    text = " ".join(
        f.text for f in findings_of(analysis).findings if f.text.startswith("Rank 2 of 3 stands")
    )
    assert "a factor of more than 2^60, or all zeros, at L1" in text
    assert "e19" not in text


def test_a_fault_in_one_sample_is_a_finding(tmp_path: Path) -> None:
    dump = write(tmp_path / "d", times(2, sample=1), ranks=1, samples=4)
    analysis = analyzed(dump, ("fp8_e4m3",))
    (finding,) = [f for f in findings_of(analysis).findings if f.text.startswith("Sample")]
    assert finding.text.startswith("Sample 1 of 4 stands out in layers 0 and 1: ")
    assert sheet_of("layer_analysis/samples", analysis).title.startswith("Sample 1 of 4 stands out")


def test_healthy_ranks_and_samples_do_not_stand_out(healthy: DumpAnalysis) -> None:
    texts = [finding.text for finding in findings_of(healthy).findings]
    assert "No rank of 3 stands out by the distribution of its finite values." in texts
    assert not any("Sample" in text for text in texts)


# Trends ------------------------------------------------------------------------------------------


def test_a_trend_needs_enough_tensors_that_are_not_quantized(healthy: DumpAnalysis) -> None:
    path = "comparisons/sqnr_by_crest"
    title = sheet_of(path, healthy).title
    assert re.fullmatch(r"int8 loses [56]\.\d dB with each doubling .*, in 60 tensors", title)
    floats = copy.deepcopy(healthy)
    for tensor in floats["tensors"]:
        del tensor["formats"]["int8"]
    no_trend = "No format loses steadily more of 60 tensors with a larger crest"
    assert sheet_of(path, floats).title == no_trend
    for tensor in floats["tensors"][:2]:  # two far out make no trend of sixty
        tensor["amax"] *= 50
        tensor["formats"]["fp8_e4m3"]["noise"] *= 100
        tensor["formats"]["fp8_e4m3"]["fitted_noise"] *= 100
    assert sheet_of(path, floats).title == no_trend
    few: Any = {**healthy, "tensors": healthy["tensors"][:19]}
    draw = picture_at(f"{path}.png").draw.build
    assert draw(few) is None
    done = copy.deepcopy(healthy)
    for tensor in done["tensors"]:
        tensor["formats"]["mxfp4_e2m1"] |= {"noise": 0.0, "rest_noise": 0.0}
    assert all(map(is_quantized, done["tensors"]))
    assert not any(map(is_quantized, healthy["tensors"]))
    assert draw(done) is None


# Names -------------------------------------------------------------------------------------------


@pytest.fixture
def known_dump(tmp_path: Path) -> DumpAnalysis:
    for layer, parts in enumerate(GENERATIONS.values()):
        known(tmp_path / "d", torch.randn(8, 64).bfloat16(), layer=layer, **parts)
    return analyzed(tmp_path / "d")


@pytest.fixture
def two_quant_types() -> DumpAnalysis:
    return dump_records.normal_record(layers=2, ranks=2)


@share(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["healthy", "planted", "known_dump", "two_quant_types", "hostile"])
def test_no_two_lines_of_a_list_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """`L2 linear backward grad_input, rank 0, iteration 7` stood for six tensors."""
    analysis = request.getfixturevalue(name)
    lists = {
        "findings": [finding.text for finding in findings_of(analysis).findings],
        "worst tensors": [
            line
            for line in tensor_stats(analysis)
            .split("Worst tensors")[1]
            .split("\n\n")[0]
            .split("\n")
            if not line.startswith(("  ", "-"))
        ],
    }
    for part in page(analysis, [], []).split("<section")[1:]:
        rows = re.findall("<th scope='row'.*?</th>", part)
        lists[f"page {part[:20]}"] = rows
    titles = []
    for picture in PICTURES:
        with np.errstate(all="ignore"):
            sheet = picture.draw.build(analysis)
        if sheet is None:
            continue
        titles.append(sheet.title)
        panels = [axes.get_title(loc="left") for axes in sheet.figure.axes]
        if picture.path != "bf16_analysis/density.png":  # every second panel is the one before it
            lists[f"{picture.path}: panels"] = [title for title in panels if title]
        for panel, axes in enumerate(sheet.figure.axes):
            labels = [label.get_text() for label in axes.get_yticklabels()]
            if any(re.search("[a-z]{3}", label) for label in labels):
                lists[f"{picture.path}: rows {panel}"] = labels
    lists["pictures"] = titles
    for where, lines in lists.items():
        twice = {line for line in lines if lines.count(line) > 1}
        assert not twice, where


def test_titles_identify_every_tensor(healthy: DumpAnalysis) -> None:
    titles = [tensor["title"] for tensor in healthy["tensors"]]
    assert len(set(titles)) == len(titles) == 60
    assert titles[4] == (
        "L0 model.layers.0.attn.k backward grad_input, rank 0, iteration 0, sample 0"
    )
    for most in (24, 40, 56, 64):
        short = row_titles(healthy["tensors"], most)
        assert len(set(short)) == 60
        assert max(map(len, short)) <= max(most, 40)
    title = tensor_title({"title": titles[4]}, 50)
    assert len(title) <= 50
    assert "grad_input, r0, it 0, s0" in title


def test_a_format_outcome_of_an_earlier_record_is_read() -> None:
    outcome = {"signal": 100.0, "noise": 1.0, "upper": 0.0, "lower": 0.0, "flush": 0.0}
    assert ratios_db(outcome) == (pytest.approx(20), pytest.approx(20))
    assert math.isnan(saturation_cost(outcome))
    assert outcome_of({"formats": {"x": outcome}}, "x") == outcome
