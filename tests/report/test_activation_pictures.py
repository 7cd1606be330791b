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
    KEYS,
    Look,
    clean,
    evenly,
    kind_name,
    look_of,
    model_stem,
    short_kinds,
    stems,
    visible,
)
from qgate.activation_stats.record import ActivationsRecord
from tests.report.activation_records import OUTLIER, RECORDS, usual

LOOK = Look()


def named(record: ActivationsRecord, name: str, look: Look = LOOK) -> ActivationPicture:
    return next(each for each in pictures(record, look) if each.name == name)


def axes_of(record: ActivationsRecord, name: str, look: Look = LOOK) -> list[Any]:
    sheet = named(record, name, look).sheet()
    assert sheet is not None
    return sheet.figure.get_axes()


def texts_of(record: ActivationsRecord, name: str, look: Look = LOOK) -> str:
    """All that is written in a picture."""
    from matplotlib.text import Text

    sheet = named(record, name, look).sheet()
    assert sheet is not None
    return "\n".join(each.get_text() for each in sheet.figure.findobj(Text))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RECORDS)
def test_every_picture_of_every_record_is_drawn(name: str) -> None:
    record = RECORDS[name]()
    record["panels"] = {k: dict(list(p.items())[-1:]) for k, p in record["panels"].items()}
    made = {each.name: each.sheet() for each in pictures(record, LOOK)}
    titles = [sheet.title for sheet in made.values() if sheet is not None]
    assert len(titles) > 10
    assert all(re.search(r"\d|No ", title) for title in titles), titles
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", file) for file in made)
    if name != "single":
        assert None not in made.values()


@pytest.mark.parametrize("name", ["large", "hostile", "single"])
def test_texts_do_not_overlap(name: str) -> None:
    """Titles, labels and legends, as they are laid out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    record = RECORDS[name]()
    record["panels"] = {k: dict(list(p.items())[-1:]) for k, p in record["panels"].items()}
    for each in pictures(record, LOOK):
        if not re.search(
            r"(down_proj|head)_input|outlier-count|smoothing-gain|sensitivity|-weight", each.name
        ):
            continue
        sheet = each.sheet()
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
                seen = not tick or axes.bbox.y0 - 2 <= middle <= axes.bbox.y1 + 2
                if text.get_text().strip() and seen:
                    assert not any(box.overlaps(other) for other in boxes), (each.name, text)
                    assert min(box.x0, box.y0) >= -1, (each.name, text.get_text())


def test_magnitudes_are_those_of_the_record() -> None:
    record = usual()
    (axes,) = axes_of(record, "mlp_down_proj_input-input")
    layers = [
        e for e in record["layers"] if e["module"].endswith("down_proj") and e["role"] == "input"
    ]
    drawn = {line.get_color(): np.asarray(line.get_ydata(), dtype=float) for line in axes.lines}
    told = [each["magnitude"]["token"] for each in layers]
    assert drawn["#d55e00"] == pytest.approx([each["top"][0] for each in told])
    assert drawn["#0072b2"] == pytest.approx([each["median"] for each in told])
    assert drawn["#009e73"] == pytest.approx([each["low"][0] for each in told])
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
    told = texts_of(usual(), name)
    assert all(each in told for each in names), told
    assert not any(each in told for each in missing), told


@pytest.mark.parametrize(
    ("reduced", "words"),
    [(-1, "of a token"), (-2, "of a channel"), (None, "of all values"), (0, "all")],
)
def test_axes_say_what_was_reduced_over(reduced: int | None, words: str) -> None:
    told = texts_of(usual(), "mlp_down_proj_input-input", replace(LOOK, reduce_dim=reduced))
    assert words in told.replace("\n", " ")


def test_titles_state_the_finding() -> None:
    record = usual()
    told = {each.name: sheet.title for each in pictures(record, LOOK) if (sheet := each.sheet())}
    assert "model.layers.1: 0.75 per sample" in told["outlier-count"]
    assert "at position 37" in told["outlier-position"]
    assert "“␣niz”" in told["outlier-token"]
    assert "Channel 5" in told["outlier-channel"]
    assert "2 layers" in told["outlier-channel"]
    assert "3 layers of 10 kept" in told["sensitivity-mxfp4_e2m1"]


def test_outlier_pictures_are_only_there_if_there_are_any() -> None:
    record = RECORDS["single"]()
    assert named(record, "outlier-position").sheet() is None
    title = named(record, "outlier-count").sheet().title  # type: ignore[union-attr]
    assert title.startswith("No token is above 64 times")


def test_max_over_p99_is_marked_above_the_known_limit() -> None:
    layer = next(each for each in usual()["layers"] if "heat_map" in each)
    for ratio, bad in ((63.0, False), (65.0, True)):
        layer["heat_map"]["stats"]["max_over_p99"] = ratio
        sheet = draw_flat(layer, LOOK)
        assert sheet is not None
        found = [
            t for axes in sheet.figure.get_axes() for t in axes.texts if t.get_text() == "Max/P99"
        ]
        assert (found[0].get_color() == "#c0392b") is bad


def test_the_heat_map_loses_no_peak() -> None:
    layer = next(each for each in usual()["layers"] if "heat_map" in each)
    layer["heat_map"]["cells"][3][7] = 400.0
    sheet = draw_flat(layer, LOOK)
    assert sheet is not None
    image = sheet.figure.get_axes()[0].images[0].get_array()
    assert image is not None
    assert image.max() == 400.0
    assert "token 3, channel 7" in sheet.title


def test_no_legend_is_drawn_where_none_is_wanted() -> None:
    for each in pictures(usual(), replace(LOOK, show_legend=False)):
        sheet = each.sheet()
        assert sheet is None or not sheet.figure.legends, each.name


def test_names_are_safe_and_never_the_same() -> None:
    told = stems([r"a\.b", "a.b", r"layers\.\d+$", "(up|down)_proj"])
    assert len(set(told.values())) == 4
    assert told[r"layers\.\d+$"] == "layers_d"
    assert told["(up|down)_proj"] == "up_down_proj"
    assert clean("../../x") == "x"
    assert clean("$^") == "all"
    assert model_stem("hf:/a/b/Llama-3.1-8B/") == "Llama-3.1-8B"
    assert model_stem("hf:../..") == "model"
    assert model_stem("tiny-llama") == "tiny-llama"


def test_kinds_are_told_apart_shortly() -> None:
    names = ["model.layers.*.mlp.down_proj", "model.layers.*.self_attn.q_proj"]
    assert list(short_kinds(names).values()) == ["mlp.down_proj", "self_attn.q_proj"]
    assert kind_name("model.layers.12.mlp.experts.7.w1") == "model.layers.*.mlp.experts.*.w1"
    assert kind_name("h.3") == "h.*"
    assert kind_name("conv2d") == "conv2d"


def test_tokens_are_visible() -> None:
    assert visible(OUTLIER) == "␣niz"
    assert visible("a\n") == "a↵"
    assert visible("") == "(empty)"
    assert visible("‮") == "\\u202e"


def test_layers_are_evenly_spaced() -> None:
    assert evenly(list(range(80)), 4) == [0, 26, 53, 79]
    assert evenly([1], 4) == [1]
    assert evenly([1, 2], 1) == [1]


def test_a_look_has_the_defaults_of_the_settings() -> None:
    from qgate.activation_stats.settings import keys

    defaults = {each.name: each.default for each in keys()}
    assert look_of({}) == LOOK
    assert look_of({key: defaults[key] for key in KEYS.values()}) == LOOK


def test_a_model_with_all_layers_kept_does_not_flatten_the_curve_of_a_proposal() -> None:
    record = usual()
    proposal = record["proposals"][0]
    proposal["target"] = "SQNR of the output ≥ 20 dB"
    proposal |= {"curve": [(0, 11.0), (2, 21.0), (9, 320.0)], "keep": ["a", "b"]}
    proposal |= {"value": 21.0, "all_quantized": 11.0, "reached": True}
    record["proposals"] = [proposal]
    made = draw_proposal(record, proposal["format"], Look())
    assert made is not None
    line = made.figure.axes[0].get_lines()[0]
    assert np.asarray(line.get_ydata()).tolist() == [11.0, 21.0]
    assert "21.0 dB" in made.title
    assert "11.0 dB" in made.title


def test_a_whole_block_does_not_lengthen_the_names_of_its_parts() -> None:
    names = ["model.layers.*.mlp.down_proj", "model.layers.*.self_attn.q_proj", "model.layers.*"]
    assert list(short_kinds(names).values()) == ["mlp.down_proj", "self_attn.q_proj", "whole block"]
    assert list(short_kinds(["model.layers.*"]).values()) == ["model.layers.*"]
    assert list(short_kinds(["h.*", "other"]).values()) == ["h.*", "other"]
