"""Every picture of a dump: drawn where there is something to draw, readable, and of the right data."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from qgate.charts.palette import FORMAT_COLORS, PALETTE, format_color
from qgate.charts.sheet import Sheet, plain
from qgate.drawing.findings import findings_of
from qgate.drawing.page import SECTIONS
from qgate.drawing.plots import distributions as dump_distributions
from qgate.drawing.plots import maps as dump_maps
from qgate.drawing.plots.pictures import PICTURES, DumpPicture
from qgate.formats import names as format_names
from qgate.results.rows import StoredRows
from qgate.summaries.reading import ratios_db
from qgate.summaries.record import DumpAnalysis
from qgate.text import brief, shortened
from tests.drawing import dump_records
from tests.shares import proof, share

BY_PATH = {picture.path: picture for picture in PICTURES}
COLORED = ("fp8_e4m3", "fp16", "mxfp4_e2m1", "hif8", "nvfp4")
LONGEST = ("quick_analysis.png", "comparisons/quant_types.png", "distributions/boxes.png")


def of_folder(folder: str) -> list[DumpPicture]:
    return [picture for picture in PICTURES if picture.folder == folder]


def built(picture: DumpPicture, analysis: DumpAnalysis) -> Sheet | None:
    with np.errstate(all="ignore"):
        return picture.draw.build(analysis)


def sheet_of(path: str, analysis: DumpAnalysis) -> Sheet:
    sheet = built(BY_PATH[path], analysis)
    assert sheet is not None
    return sheet


def labels_of(sheet: Sheet) -> Iterator[list[Any]]:
    """The boxes of the tick labels along each axis, in the order they lie."""
    canvas = FigureCanvasAgg(sheet.figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    for axes in sheet.figure.axes:
        for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            low, high = sorted(axis.get_view_interval())
            boxes = [
                label.get_window_extent(renderer)
                for tick, label in zip(
                    axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False
                )
                if label.get_visible() and label.get_text() and low <= tick <= high
            ]
            if axis.get_tick_params().get("labelleft", True) and axis.get_visible():
                yield sorted(boxes, key=lambda box: getattr(box, f"{side}0"))


def test_every_folder_has_pictures_and_every_file_one() -> None:
    assert set(BY_PATH) == {picture.path for picture in PICTURES}
    assert len(BY_PATH) == len(PICTURES)
    assert {picture.folder for picture in PICTURES} == {"", *SECTIONS}


@share(32)
@pytest.mark.parametrize("path", BY_PATH)
def test_each_picture_is_drawn_and_no_labels_overlap(path: str, normal: DumpAnalysis) -> None:
    sheet = sheet_of(path, normal)
    assert any(letter.isdigit() for letter in sheet.title), sheet.title
    for boxes in labels_of(sheet):
        assert len(boxes) <= 42
        for one, other in pairwise(boxes):
            wide = min(one.x1, other.x1) - max(one.x0, other.x0)
            high = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert wide < 1 or high < 1.5, f"{path}: labels overlap"
    for axes in sheet.figure.axes:
        if axes.get_label() == "<colorbar>":
            continue
        assert axes.get_window_extent().width > 40, f"{path}: a panel collapsed"
        artists = [*axes.lines, *axes.patches, *axes.collections, *axes.images, *axes.texts]
        assert artists, f"{path}: an empty panel"


@proof
def test_extreme_records_are_drawn_without_a_warning(extreme: DumpAnalysis, tmp_path: Path) -> None:
    """Without laying it out, which takes most of the time, but for where names are long."""
    hostile = any(tensor["title"] == dump_records.HOSTILE[0] for tensor in extreme["tensors"])
    chosen = PICTURES if hostile or not extreme["comparison"] else of_folder("fp8_analysis")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # garbage of tests before this one
        for picture in chosen:
            sheet = built(picture, extreme)
            if sheet is not None:
                if not (hostile and picture.path in LONGEST):
                    sheet.figure.set_layout_engine("none")
                sheet.figure.savefig(tmp_path / "a.png", dpi=16)
                assert sheet.title


def test_a_record_without_tensors_draws_nothing() -> None:
    empty = dump_records.no_tensor()
    assert [picture.path for picture in PICTURES if built(picture, empty) is not None] == []


@proof
def test_a_missing_field_is_no_error(normal: DumpAnalysis) -> None:
    """Whatever optional figure is missing, the others are still drawn."""
    for names in (("binades", "channels", "std"), ("quantiles", "rms"), ("formats", "amax")):
        record: Any = {
            **normal,
            "tensors": [
                {k: v for k, v in t.items() if k not in names} for t in normal["tensors"][::17]
            ],
            "groups": [
                {k: v for k, v in g.items() if k not in names} for g in normal["groups"][::5]
            ],
        }
        for picture in PICTURES:
            built(picture, record)


# What is in them ------------------------------------------------------------------------------------


def test_the_histogram_shows_the_counts_of_the_record(normal: DumpAnalysis) -> None:
    sheet = sheet_of("distributions/magnitudes.png", normal)
    group = next(g for g in normal["groups"] if (g["name"], g["quant_type"]) == ("query", "hifp8"))
    axes = next(a for a in sheet.figure.axes if a.get_title(loc="left").endswith("query"))
    values, edges, _ = axes.patches[0].get_data()
    counts = np.array(group["binades"]["counts"])
    assert values == pytest.approx(counts / counts.sum() * 100)
    assert edges[0] == group["binades"]["first"]
    assert math.log2(2.0**-6) in [line.get_xdata()[0] for line in axes.lines]


def test_the_map_holds_the_largest_magnitude_of_each_layer(normal: DumpAnalysis) -> None:
    axes = sheet_of("heatmaps/amax.png", normal).figure.axes[0]
    cells = axes.images[0].get_array()
    names = [label.get_text() for label in axes.get_yticklabels()]
    row = names.index("attention forward key")
    expected = [
        max(t["amax"] for t in normal["tensors"] if t["layer"] == layer and t["name"] == "key")
        for layer in range(4)
    ]
    assert cells[row].tolist() == pytest.approx(expected)
    assert len(axes.lines) == 1


def test_the_dots_are_the_ratios_of_the_record(normal: DumpAnalysis) -> None:
    sheet = sheet_of("comparisons/sqnr_by_layer.png", normal)
    outcomes = [t["formats"]["mxfp4_e2m1"] for t in normal["tensors"]]
    expected = [10 * math.log10(outcome["signal"] / outcome["noise"]) for outcome in outcomes]
    dots = sheet.figure.axes[0].collections[0].get_offsets()[:, 1]
    assert sorted(dots) == pytest.approx(sorted(expected))
    assert sheet.title.startswith(f"mxfp4_e2m1 loses most: worst {min(expected):.1f} dB at L")


def test_a_variance_that_no_float_holds_is_left_out() -> None:
    """Seen with float64 tensors of 1e200, whose variance is beyond float64."""
    analysis = dump_records.one_tensor()
    analysis["tensors"][0]["std"] = 1e200
    panels = sheet_of("bf16_analysis/moments.png", analysis).figure.axes
    assert [axes.get_xlabel() for axes in panels] == ["skew", "excess kurtosis"]


def test_two_ranks_are_too_few_to_stand_out(normal: DumpAnalysis) -> None:
    two = copy.deepcopy(normal)
    assert two["ranks"] is not None
    two["ranks"]["rows"] = two["ranks"]["rows"][:2]
    two["ranks"]["stands_out"] = None
    words = "Three ranks are needed to say which stands out, here are 2"
    assert any(words in finding.text for finding in findings_of(two).findings)
    title = sheet_of("rank_analysis/scores.png", two).title
    assert " ".join(title.split()).startswith(words)


def test_thousands_of_tensors_are_few_artists() -> None:
    many = dump_records.many_tensors()
    for path in ("comparisons/sqnr_by_layer.png", "heatmaps/amax.png", "layer_analysis/depth.png"):
        panels = sheet_of(path, many).figure.axes
        assert sum(len(axes.get_children()) for axes in panels) < 200


def test_an_unknown_layer_comes_last() -> None:
    assert dump_maps.sorted_layers([None, 3, 1, None]) == [1, 3, None]


def test_quantiles_are_in_standard_deviations(normal: DumpAnalysis) -> None:
    group = normal["groups"][0]
    pair = dump_distributions.quantile_pairs(group)
    assert pair is not None
    expected = (np.array(group["qq"]["values"]) - group["mean"]) / group["std"]
    assert pair[1] == pytest.approx(expected)
    assert dump_distributions.quantile_pairs({**group, "std": 0.0}) is None


# Colors of formats -----------------------------------------------------------------------------------


def test_every_format_has_its_own_color() -> None:
    colors = {name: format_color(name) for name in format_names()}
    assert len(set(colors.values())) == len(colors)
    assert set(colors) <= set(FORMAT_COLORS)
    assert format_color("mine_e3m4") == format_color("mine_e3m4") in PALETTE


@proof
@pytest.mark.filterwarnings("ignore")
def test_a_format_has_one_color_in_all_pictures(normal: DumpAnalysis) -> None:
    few = [t for t in normal["tensors"] if t["rank"] < 2 and (t["layer"] or 0) < 2]
    analysis: Any = {**normal, "tensors": few}
    legend_entries = 0
    for picture in PICTURES:
        sheet = built(picture, analysis)
        for legend in sheet.figure.legends if sheet else ():
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
                name = text.get_text().strip().split(" ")[0]
                if name in COLORED:
                    color = getattr(handle, "get_facecolor", None) or handle.get_color
                    assert to_hex(color()) == format_color(name), picture.path
                    legend_entries += 1
    assert legend_entries > 15


# Names and numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("$x_1$", r"\$x_1\$"),
        ("a\nb", r"a\nb"),
        ("名", "□"),
        ("x" * 50, "x" * 19 + "…" + "x" * 20),
        ("<b>%", "<b>%"),
    ],
)
def test_a_name_is_drawn_letter_by_letter(name: str, drawn: str) -> None:
    assert plain(name) == drawn


def test_a_long_number_is_brief_and_a_short_name_whole() -> None:
    assert brief(123456.0) == "1.23e5"
    assert shortened("abc") == "abc"


def test_a_format_without_scales_is_taken_at_its_better_ratio() -> None:
    outcome = {"signal": 100.0, "noise": 1.0, "fitted_signal": 1000.0, "fitted_noise": 1.0}
    assert ratios_db(outcome)[0] == pytest.approx(30)
    assert ratios_db({**outcome, "noise": 0.0})[0] == math.inf
    assert ratios_db({"signal": 100.0, "noise": 1.0})[0] == pytest.approx(20)
    for nothing in ({}, {"signal": 0.0, "noise": 0.0}, {"signal": math.nan, "noise": 1.0}):
        assert math.isnan(ratios_db(nothing)[0])


@proof
def test_records_on_disk_are_drawn_as_those_in_memory(normal: DumpAnalysis) -> None:
    few: Any = {**normal, "tensors": normal["tensors"][::7]}
    comparison, ranks = few["comparison"], few["ranks"]
    stored: Any = {
        **few,
        "tensors": StoredRows(few["tensors"], held=0),
        "comparison": {**comparison, "pairs": StoredRows(comparison["pairs"], held=0)},
        "ranks": {**ranks, "tensors": StoredRows(ranks["tensors"], held=0)},
    }
    sheets = 0
    for picture in PICTURES:
        memory_sheet, disk_sheet = (built(picture, record) for record in (few, stored))
        assert (memory_sheet is None) == (disk_sheet is None), picture.path
        if memory_sheet is not None and disk_sheet is not None:
            sheets += 1
            assert _drawn(memory_sheet) == _drawn(disk_sheet), picture.path
    assert sheets > 35


def _drawn(sheet: Sheet) -> list[Any]:
    """What is on it, not laid out."""
    contents: list[Any] = [sheet.title]
    for axes in sheet.figure.axes:
        contents += [(line.get_xydata().tolist(), line.get_color()) for line in axes.lines]
        contents += [
            (patch.get_path().vertices.tolist(), patch.get_facecolor()) for patch in axes.patches
        ]
        contents += [np.ma.filled(image.get_array(), -1).tolist() for image in axes.images]
        for collection in axes.collections:
            values = collection.get_array()
            contents.append(
                (collection.get_offsets().tolist(), collection.get_facecolor().tolist())
            )
            contents.append(None if values is None else np.ma.filled(values, -1).tolist())
        contents += [(text.get_text(), text.get_position()) for text in axes.texts]
    return [repr(content) for content in contents]
