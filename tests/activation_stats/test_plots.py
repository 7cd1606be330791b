"""Pictures of activations show the numbers of the record, under the right names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qgate.activation_stats.plots.formats import draw_proposal
from qgate.activation_stats.plots.heatmaps import draw_flat
from qgate.activation_stats.plots.pictures import ActivationPicture, pictures
from qgate.activation_stats.reading import (
    clean,
    kind_name,
    model_stem,
    short_kinds,
    spread_evenly,
    stems,
    visible,
)
from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.settings import ViewSettings
from tests.activation_stats.activation_records import OUTLIER, RECORDS, usual
from tests.shares import proof

LOOK = ViewSettings()


def named(record: ActivationsRecord, name: str, options: ViewSettings = LOOK) -> ActivationPicture:
    return next(picture for picture in pictures(record, options) if picture.name == name)


def axes_of(record: ActivationsRecord, name: str, options: ViewSettings = LOOK) -> list[Any]:
    sheet = named(record, name, options).sheet()
    assert sheet is not None
    return sheet.figure.get_axes()


def texts_of(record: ActivationsRecord, name: str, options: ViewSettings = LOOK) -> str:
    """All that is written in a picture."""
    from matplotlib.text import Text

    sheet = named(record, name, options).sheet()
    assert sheet is not None
    return "\n".join(text.get_text() for text in sheet.figure.findobj(Text))  # type: ignore[attr-defined]


@proof
@pytest.mark.parametrize("name", RECORDS)
def test_every_picture_of_every_record_is_drawn(name: str) -> None:
    record = RECORDS[name]()
    record["panels"] = {k: dict(list(p.items())[-1:]) for k, p in record["panels"].items()}
    sheets = {picture.name: picture.sheet() for picture in pictures(record, LOOK)}
    titles = [sheet.title for sheet in sheets.values() if sheet is not None]
    assert len(titles) > 10
    assert all(re.search(r"\d|No ", title) for title in titles), titles
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", file) for file in sheets)
    if name != "single":
        assert None not in sheets.values()


@proof
@pytest.mark.parametrize("name", ["large", "hostile", "single"])
def test_texts_do_not_overlap(name: str) -> None:
    """Titles, labels and legends, as they are laid out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    record = RECORDS[name]()
    record["panels"] = {k: dict(list(p.items())[-1:]) for k, p in record["panels"].items()}
    for picture in pictures(record, LOOK):
        if not re.search(
            r"(down_proj|head)_input|outlier-count|smoothing-gain|sensitivity|-weight", picture.name
        ):
            continue
        sheet = picture.sheet()
        if sheet is None:
            continue
        figure = sheet.figure
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = [figure._suptitle.get_window_extent(renderer)]  # type: ignore[attr-defined]
        if figure._supylabel is not None:  # type: ignore[attr-defined]
            boxes.append(figure._supylabel.get_window_extent(renderer))  # type: ignore[attr-defined]
        boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
        for axes in figure.get_axes():
            for text in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.get_yticklabels()):
                box = text.get_window_extent(renderer)
                tick = text not in (axes.xaxis.label, axes.yaxis.label, axes.title)
                middle = (box.y0 + box.y1) / 2
                visible_text = not tick or axes.bbox.y0 - 2 <= middle <= axes.bbox.y1 + 2
                if text.get_text().strip() and visible_text:
                    assert not any(box.overlaps(other) for other in boxes), (picture.name, text)
                    assert min(box.x0, box.y0) >= -1, (picture.name, text.get_text())


def test_magnitudes_are_those_of_the_record() -> None:
    record = usual()
    (axes,) = axes_of(record, "mlp_down_proj_input-input")
    layers = [
        e for e in record["layers"] if e["module"].endswith("down_proj") and e["role"] == "input"
    ]
    curves = {line.get_color(): np.asarray(line.get_ydata(), dtype=float) for line in axes.lines}
    magnitudes = [magnitude["magnitude"]["token"] for magnitude in layers]
    assert curves["#d55e00"] == pytest.approx([magnitude["top"][0] for magnitude in magnitudes])
    assert curves["#0072b2"] == pytest.approx([magnitude["median"] for magnitude in magnitudes])
    assert curves["#009e73"] == pytest.approx([magnitude["low"][0] for magnitude in magnitudes])
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "names", "missing"),
    [
        ("mlp_down_proj_input-input", ["top-1", "top-3", "median", "min"], ["max"]),
        ("mlp_down_proj_output-output", ["max", "median", "min-1", "min-2", "min-3"], ["top-1"]),
        ("mlp_down_proj-weight", ["top-1", "input channel"], []),
    ],
)
def test_labels_are_right(name: str, names: list[str], missing: list[str]) -> None:
    written = texts_of(usual(), name)
    assert all(label in written for label in names), written
    assert not any(label in written for label in missing), written


@pytest.mark.parametrize(
    ("reduced", "words"),
    [(-1, "of a token"), (-2, "of a channel"), (None, "of all values"), (0, "all")],
)
def test_axes_say_what_was_reduced_over(reduced: int | None, words: str) -> None:
    written = texts_of(
        usual(),
        "mlp_down_proj_input-input",
        replace(LOOK, magnitude=replace(LOOK.magnitude, reduce_dim=reduced)),
    )
    assert words in written.replace("\n", " ")


def test_titles_state_the_finding() -> None:
    record = usual()
    names = ["count", "position", "token", "channel"]
    pictures_by_name = {
        n: named(record, n) for n in (*(f"outlier-{n}" for n in names), "sensitivity-mxfp4_e2m1")
    }
    titles = {
        n: sheet.title for n, picture in pictures_by_name.items() if (sheet := picture.sheet())
    }
    assert "model.layers.1: 0.75 per sample" in titles["outlier-count"]
    assert "at position 37" in titles["outlier-position"]
    assert "“␣niz”" in titles["outlier-token"]
    assert "Channel 5" in titles["outlier-channel"]
    assert "2 layers" in titles["outlier-channel"]
    assert "3 layers of 10 kept" in titles["sensitivity-mxfp4_e2m1"]


def test_outlier_pictures_are_only_there_if_there_are_any() -> None:
    record = RECORDS["single"]()
    assert named(record, "outlier-position").sheet() is None
    title = named(record, "outlier-count").sheet().title  # type: ignore[union-attr]
    assert title.startswith("No token is above 64 times")


def test_max_over_p99_is_marked_above_64() -> None:
    layer = next(entry for entry in usual()["layers"] if "heat_map" in entry)
    for ratio, bad in ((63.0, False), (65.0, True)):
        layer["heat_map"]["stats"]["max_over_p99"] = ratio
        sheet = draw_flat(layer, LOOK)
        assert sheet is not None
        labels = [
            t for axes in sheet.figure.get_axes() for t in axes.texts if t.get_text() == "Max/P99"
        ]
        assert (labels[0].get_color() == "#c0392b") is bad


def test_the_heat_map_loses_no_peak() -> None:
    layer = next(entry for entry in usual()["layers"] if "heat_map" in entry)
    layer["heat_map"]["cells"][3][7] = 400.0
    sheet = draw_flat(layer, LOOK)
    assert sheet is not None
    image = sheet.figure.get_axes()[0].images[0].get_array()
    assert image is not None
    assert image.max() == 400.0
    assert "token 3, channel 7" in sheet.title


@proof
def test_no_legend_is_drawn_where_none_is_wanted() -> None:
    for picture in pictures(usual(), replace(LOOK, show_legend=False)):
        sheet = picture.sheet()
        assert sheet is None or not sheet.figure.legends, picture.name


def test_names_are_safe_and_never_the_same() -> None:
    names = stems([r"a\.b", "a.b", r"layers\.\d+$", "(up|down)_proj"])
    assert len(set(names.values())) == 4
    assert names[r"layers\.\d+$"] == "layers_d"
    assert names["(up|down)_proj"] == "up_down_proj"
    assert clean("../../x") == "x"
    assert clean("$^") == "all"
    assert model_stem("hf:/a/b/Llama-3.1-8B/") == "Llama-3.1-8B"
    assert model_stem("hf:../..") == "model"
    assert model_stem("tiny-llama") == "tiny-llama"


def test_kinds_are_told_apart_shortly() -> None:
    names = ["model.layers.*.mlp.down_proj", "model.layers.*.self_attn.q_proj", "model.layers.*"]
    assert list(short_kinds(names[:2]).values()) == ["mlp.down_proj", "self_attn.q_proj"]
    assert list(short_kinds(names).values()) == ["mlp.down_proj", "self_attn.q_proj", "whole block"]
    assert list(short_kinds(names[2:]).values()) == ["model.layers.*"]
    assert list(short_kinds(["h.*", "other"]).values()) == ["h.*", "other"]
    assert kind_name("model.layers.12.mlp.experts.7.w1") == "model.layers.*.mlp.experts.*.w1"
    assert kind_name("h.3") == "h.*"
    assert kind_name("conv2d") == "conv2d"


def test_tokens_are_visible() -> None:
    assert visible(OUTLIER) == "␣niz"
    assert visible("a\n") == "a↵"
    assert visible("") == "(empty)"
    assert visible("‮") == "\\u202e"


def test_layers_are_evenly_spaced() -> None:
    assert spread_evenly(list(range(80)), 4) == [0, 26, 53, 79]
    assert spread_evenly([1], 4) == [1]
    assert spread_evenly([1, 2], 1) == [1]


def test_a_model_with_all_layers_kept_does_not_flatten_the_curve_of_a_proposal() -> None:
    record = usual()
    proposal = record["proposals"][0]
    proposal["target"] = "SQNR of the output ≥ 20 dB"
    proposal |= {"curve": [(0, 11.0), (2, 21.0), (9, 320.0)], "keep": ["a", "b"]}
    proposal |= {"value": 21.0, "all_quantized": 11.0, "reached": True}
    record["proposals"] = [proposal]
    sheet = draw_proposal(record, proposal["format"], ViewSettings())
    assert sheet is not None
    line = sheet.figure.axes[0].get_lines()[0]
    assert np.asarray(line.get_ydata()).tolist() == [11.0, 21.0]
    assert "21.0 dB" in sheet.title
    assert "11.0 dB" in sheet.title
