"""The pictures of the gates' page: what is drawn is what was given, and their titles are true."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qgate.charts import lines as _lines
from qgate.charts import svg as _svg
from qgate.page.plots import errors as _errors
from qgate.page.plots import panels
from qgate.page.plots.errors import (
    align_layers,
    density,
    error_by_magnitude,
    error_growth,
    error_histogram,
    growth_finding,
    layer_names,
    shades,
    worst_channels,
)
from qgate.page.plots.long_texts import (
    divergence_along,
    divergence_finding,
    loss_along,
    loss_finding,
)
from qgate.page.plots.magnitudes import magnitude_histogram, magnitudes_finding
from qgate.page.plots.panels import panels_of, sweep_curve, sweep_finding
from qgate.page.runs import Growth

REFERENCES = Path(__file__).with_name("stored_plots")
HOSTILE = "<script>alert('1')</script>&\x1b[31m\u202e\ud800\n" + "long " * 60
Picture = dict[str, Any]


# What is given ---------------------------------------------------------------------------------


def errors(**changes: Any) -> Picture:
    """One in four errors around zero, the rest evenly on both sides; rounding to a float."""
    picture: Picture = {
        "kind": "errors",
        "elements": 4000,
        "sampled": 1003,
        "rms": 0.5,
        "bins": {"edge": 0.04, "counts": [50, 150, 200, 200, 200, 150, 50], "below": 1, "above": 2},
        "density": {"size": 5, "edge": 1.5, "cells": [0, 0, 3, 1, 1, 300, 2, 2, 400, 3, 3, 297, 4, 4, 3]},
        "octaves": {
            "low": -3,
            "error": [0.05, 0.1, 0.25, 0.4, 0.2],
            "energy": [0.05, 0.1, 0.2, 0.4, 0.25],
            "elements": [500, 200, 150, 100, 53],
        },
        "channels": [
            {"index": 17, "share": 0.3, "relative_mse": 0.012},
            {"index": 3, "share": 0.15, "relative_mse": 0.01},
            {"index": 90, "share": 0.1, "relative_mse": None},
        ],
        "channel_count": 128,
    }  # fmt: skip
    return picture | changes


def bins(counts: list[int], below: int = 0, above: int = 0, edge: float = 1.0) -> Picture:
    total = sum(counts) + below + above
    content = {"edge": edge, "counts": counts, "below": below, "above": above}
    return errors(bins=content, sampled=total, elements=total)


def shares(*of_channels: float, count: int = 128) -> Picture:
    channels = [{"index": at, "share": s, "relative_mse": s} for at, s in enumerate(of_channels)]
    return errors(channels=channels, channel_count=count)


def cells(*triples: int, size: int = 40, rms: float = 1.0) -> Picture:
    return errors(density={"size": size, "edge": 4.0, "cells": list(triples)}, rms=rms)


def octaves(error: list[float], energy: list[float]) -> Picture:
    return errors(octaves={"low": -3, "error": error, "energy": energy, "elements": [1, 1]})


def sweep(levels: list[tuple[float, float]], recommended: float, accepted: Any = None) -> Picture:
    return {
        "kind": "sweep",
        "format": "e4m3",
        "levels": levels,
        "recommended": recommended,
        "accepted": accepted,
    }


CURVE = [(-3.0, 4e-3), (-2.0, 1e-3), (-1.0, 2.5e-4), (0.0, 5e-4), (1.0, 8e-3), (2.0, 0.11)]


def magnitudes(**changes: Any) -> Picture:
    picture: Picture = {
        "kind": "magnitudes",
        "format": "e4m3",
        "low": -4,
        "counts": [1, 20, 300, 4000, 2000, 0, 7],
        "zeros": 10,
        "nonfinite": 0,
        "largest": 1.81,
        "smallest": -2.0,
        "saturated": 7,
        "flushed": 21,
    }
    return picture | changes


def along(**changes: Any) -> Picture:
    """A text of 32 tokens in four stretches; the loss leaves the reference's interval in the last two."""
    picture: Picture = {
        "kind": "long_text",
        "stretch": 8,
        "kl": [0.001, 0.002, 0.03, 0.064],
        "bits": [1.0, 1.1, 1.5, 2.0],
        "reference": [1.0, 1.0, 1.0, 1.0],
        "half_95": [0.25, 0.25, 0.25, 0.25],
    }
    return picture | changes


def growth(mode: str, carried: list[Any], local: list[Any] | None = None) -> Growth:
    names = tuple(f"layers.{at}" for at in range(len(carried)))
    return Growth("tiny", mode, names, tuple(carried), tuple(local or [None] * len(carried)))


DRAWN: dict[str, Callable[[], str]] = {
    "error_histogram": lambda: error_histogram(errors()),  # type: ignore[arg-type]
    "density": lambda: density(errors()),  # type: ignore[arg-type]
    "worst_channels": lambda: worst_channels(errors()),  # type: ignore[arg-type]
    "error_by_magnitude": lambda: error_by_magnitude(errors()),  # type: ignore[arg-type]
    "sweep": lambda: sweep_curve(sweep(CURVE, -1.0, 1.0)),  # type: ignore[arg-type]
    "magnitudes": lambda: magnitude_histogram(magnitudes()),  # type: ignore[arg-type]
    "divergence_along": lambda: divergence_along(along()),  # type: ignore[arg-type]
    "loss_along": lambda: loss_along(along()),  # type: ignore[arg-type]
    "growth": lambda: error_growth([growth("2-1", [0, 1e-4, None, 3e-3], [0, 1e-4, 2e-4, 1e-4])]),
}


# What is drawn, read back ----------------------------------------------------------------------


def read_axis(written: str) -> _svg.Axis:
    kind, *ends = written.split(" ")
    low, high, start, end, *zero = (float(text) for text in ends)
    return _svg.Axis(kind, low, high, start, end, zero=zero[0] if zero else None)  # type: ignore[arg-type]


def value_at(axis: _svg.Axis, pixel: float) -> float:
    """What is drawn at a place."""
    if axis.zero is not None and abs(pixel - axis.zero) < 0.06:
        return 0.0
    low, high = axis._bent(axis.low), axis._bent(axis.high)
    bent = low + (pixel - axis.start) / (axis.end - axis.start) * (high - low)
    if axis.kind == "log":
        return float(10.0**bent)
    return math.sinh(bent) if axis.kind == "asinh" else bent


class Drawn:
    """A picture as it stands in its file: well-formed, and read back through its axes."""

    def __init__(self, svg: str) -> None:
        self.svg = svg
        self.root = ET.fromstring(svg)
        self.data = next(g for g in self.root.iter("g") if "data-x" in g.attrib)
        self.x, self.y = (read_axis(self.data.attrib[name]) for name in ("data-x", "data-y"))

    @property
    def words(self) -> list[str]:
        return [element.text or "" for element in self.root.iter("text")]

    @property
    def title(self) -> str:
        bold = [e.text or "" for e in self.root.iter("text") if "font-weight" in e.attrib]
        return " ".join(bold)

    def paths(self, **attributes: str) -> list[str]:
        expected = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            element.attrib["d"]
            for element in self.data.iter("path")
            if all(value in element.attrib.get(name, "") for name, value in expected.items())
        ]

    def line(self, d: str) -> list[tuple[float, float]]:
        return [(value_at(self.x, x), value_at(self.y, y)) for x, y in points(d)]


def tokens(d: str) -> list[tuple[str, list[float]]]:
    pieces = re.findall(r"([A-Za-z])([^A-Za-z]*)", d)
    return [
        (c, [float(n) for n in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", arguments)])
        for c, arguments in pieces
    ]


def points(d: str) -> list[tuple[float, float]]:
    """The corners of a line of absolute and relative steps."""
    corners: list[tuple[float, float]] = []
    for command, values in tokens(d):
        for x, y in zip(values[::2], values[1::2], strict=True):
            base = corners[-1] if command == "l" else (0.0, 0.0)
            corners.append((base[0] + x, base[1] + y))
    return corners


def boxes(d: str) -> list[tuple[float, float, float, float]]:
    moves = re.findall(r"M([^hvz]*)h([^hvz]*)v([^hvz]*)h[^hvz]*z", d)
    numbers = [
        [float(n) for part in move for n in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", part)]
        for move in moves
    ]
    return [(a, b, c, d) for a, b, c, d in numbers]


def places(d: str) -> list[tuple[float, float]]:
    """Where markers are: each begins with a move to its place."""
    return [(values[0], values[1]) for command, values in tokens(d) if command == "M"]


def near(actual: list[Any], expected: list[Any], *, rel: float = 0.02, floor: float = 0.0) -> bool:
    flat, other = (
        [n for value in rows for n in (value if isinstance(value, tuple) else (value,))]
        for rows in (actual, expected)
    )
    return flat == pytest.approx(other, rel=rel, abs=floor)


# All of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_as_it_was(name: str) -> None:
    """`QGATE_NEW_PLOTS=1` writes what is drawn now; look at it before it is committed."""
    path, svg = REFERENCES / f"{name}.svg", _svg.standalone(DRAWN[name]()) + "\n"
    if os.environ.get("QGATE_NEW_PLOTS"):
        path.write_text(svg, encoding="utf-8")
    assert svg == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_small_sharp_and_said(name: str) -> None:
    svg = DRAWN[name]()
    picture = Drawn(svg)
    assert len(svg.encode()) < 6_000
    assert picture.root.attrib["role"] == "img"
    label = picture.root.attrib["aria-label"]
    assert label.startswith(picture.title)
    assert re.search(r"\d", label.removeprefix(picture.title))
    assert " id=" not in svg
    assert "nan" not in svg
    assert "inf" not in svg
    sizes = [float(e.attrib["font-size"]) for e in picture.root.iter() if "font-size" in e.attrib]
    assert min(sizes) >= 11
    assert not re.search(r"(?:fill|stroke)=\"#", svg), "a color that does not follow the page"
    drawn_paths = " ".join(e.attrib["d"] for e in picture.root.iter("path")).replace("h.01", "")
    assert not re.search(r"\.\d\d", drawn_paths), "more decimals than can be seen"


@pytest.mark.parametrize("name", DRAWN)
def test_no_words_leave_the_picture_or_meet(name: str) -> None:
    picture = Drawn(DRAWN[name]())
    spans: list[tuple[float, float, float, float]] = []
    for element in picture.root.iter("text"):
        size = float(element.attrib.get("font-size", 11))
        bold = _svg.BOLD if "font-weight" in element.attrib else 1
        wide = 0.93 * bold * _svg.text_width(element.text or "", size)
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        start = x - wide * {"middle": 0.5, "end": 1.0}.get(element.get("text-anchor", ""), 0.0)
        assert start >= -1, element.text
        assert start + wide <= 341, element.text
        for a, b, c, d in spans:
            assert start >= b or start + wide <= a or y - 9 >= d or y <= c, element.text
        spans.append((start, start + wide, y - 8, y))


def test_an_image_of_its_own_brings_its_colors_and_a_ground() -> None:
    root = ET.fromstring(_svg.standalone(DRAWN["sweep"]()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    assert "prefers-color-scheme:dark" in (style.text or "")
    assert set(re.findall(r"var\((--\w+),", DRAWN["sweep"]())) <= set(re.findall(r"--\w+", style.text or ""))  # fmt: skip


def test_every_color_can_be_read_on_its_ground() -> None:
    def bright(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for name, pair in _svg.COLORS.items():
        for at, color in enumerate(pair):
            ground, ink = bright(_svg.COLORS["paper"][at]), bright(color)
            contrast = (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05)
            # Words need 4.5; gray is for lines only, and the grid is not needed to read anything.
            least = {"paper": 1.0, "grid": 1.0, "gray": 3.0}.get(name, 4.5)
            assert contrast >= least, (name, at, contrast)


def test_names_stay_text() -> None:
    svgs = [
        sweep_curve(sweep(CURVE, -1.0) | {"format": HOSTILE}),  # type: ignore[arg-type]
        magnitude_histogram(magnitudes(format=HOSTILE)),  # type: ignore[arg-type]
        error_growth([Growth(HOSTILE, HOSTILE, (HOSTILE,) * 2, (1e-3, 2e-3), (None, None))]),
    ]
    for svg in svgs:
        tags = {element.tag for element in Drawn(svg).root.iter()}
        assert tags <= {"svg", "g", "path", "text"}
        assert all(char.isprintable() for char in svg)
        svg.encode("utf-8")


def test_drawing_loads_neither_torch_nor_matplotlib_nor_numpy() -> None:
    code = (
        "import sys, qgate.page.plots.panels, qgate.page.plots.errors; "
        "print([m for m in ('torch', 'matplotlib', 'numpy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.03, 0.03), (-7, 1e6), (1e-300, 3e-300), (-1e300, 1e300), (5, 5.001)])  # fmt: skip
def test_linear_ticks_are_round_few_and_true(low: float, high: float) -> None:
    axis = _svg.linear(low, high, 42, 332, "x")
    power = re.search(r"10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", axis.label)
    raised = "⁰¹²³⁴⁵⁶⁷⁸⁹"
    exponent = int("".join("-" if c == "⁻" else str(raised.index(c)) for c in power[1])) if power else 0  # fmt: skip
    assert 1 <= len(axis.ticks) <= 8
    for value, text in axis.ticks:
        assert 42 - 1 <= axis.place(value) <= 332 + 1
        written = float(text.replace("−", "-"))
        assert written == pytest.approx(value / 10.0**exponent, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("values", [[1e-3], [1e-9, 1.0], [0.0, 2e-5, 3e-5], [1e-300, 1e300], [3.0, 4.0], [0.0]])  # fmt: skip
def test_logarithmic_axes_hold_their_values(values: list[float]) -> None:
    axis = _svg.logarithmic(values, 190, 50)
    for value in values:
        pixel = axis.place(value)
        assert 50 <= pixel <= 190
        assert value_at(axis, pixel) == pytest.approx(value, rel=1e-6)
        assert value_at(read_axis(axis.written()), pixel) == pytest.approx(value, rel=1e-3)
    assert 1 <= len(axis.ticks) <= 8
    for value, text in axis.ticks:
        assert float(text) == pytest.approx(value, rel=1e-9)
    if 0.0 in values:
        nonzero = [axis.place(value) for value in values if value]
        assert all(axis.place(0.0) > pixel + 10 for pixel in nonzero)


def test_numbers_are_said_short_and_true() -> None:
    assert [_svg.brief(v) for v in (0, 1e-4, 0.01234, 123456, -2.5e-7)] == ["0", "1e-4", "0.0123", "1.2e5", "-2.5e-7"]  # fmt: skip
    assert [_svg.number(v) for v in (0.04, -0.04, 0.5, -0.5, 10.25, 3)] == ["0", "0", ".5", "-.5", "10.2", "3"]  # fmt: skip
    assert _svg.numbers([1, -2.5, 0.5, -0.5]) == "1-2.5 .5-.5"
    assert _svg.cut_to_width("layers.0.mixer.in_proj:output", 100).startswith("layers")
    assert _svg.text_width(_svg.cut_to_width("x" * 500, 60)) <= 60


def test_names_at_the_ends_of_lines_keep_their_distance() -> None:
    placed = _lines.spread([100, 101, 102, 189], 13, 50, 190)
    assert all(b - a >= 13 - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= 50
    assert placed[-1] <= 190
    assert _lines.spread([190] * 5, 13, 50, 190)[-1] == 190
    lines = [
        _lines.Line(f"a very long name of a mode, number {at}, with an end", ()) for at in "12"
    ]
    assert [name.strip("…") for name in _lines.distinct_names(lines)] == ["1", "2"]


# Errors ----------------------------------------------------------------------------------------


def test_the_histogram_has_the_counts_given() -> None:
    picture = errors()
    parsed = Drawn(error_histogram(picture))  # type: ignore[arg-type]
    bars = [box for d in parsed.paths(fill="var") for box in boxes(d)]
    inside = sorted(box for box in bars if box[2] > 13)
    assert near([value_at(parsed.y, y) for _, y, *_ in inside], picture["bins"]["counts"])
    assert near(
        [value_at(parsed.x, x) for x, *_ in inside],
        [-0.04 + 0.08 * k / 7 for k in range(7)],
        floor=2e-4,
    )
    assert len(bars) - len(inside) == 2
    assert "← 1 beyond" in parsed.words
    assert "2 beyond →" in parsed.words
    assert "below 0: 50 %" in parsed.words


def test_a_histogram_with_one_high_bin_has_a_logarithmic_axis() -> None:
    counts = [1, 0, 5, 90_000, 7, 12, 1]
    picture = Drawn(error_histogram(bins(counts)))  # type: ignore[arg-type]
    assert picture.y.kind == "log"
    bars = sorted(box for d in picture.paths(fill="var") for box in boxes(d))
    assert near([value_at(picture.y, y) for _, y, *_ in bars], [c for c in counts if c], rel=0.1)


def test_errors_of_zero_are_one_bar_at_zero() -> None:
    picture = Drawn(error_histogram(bins([500], edge=0.0)))  # type: ignore[arg-type]
    (bar,) = [box for d in picture.paths(fill="var") for box in boxes(d)]
    assert value_at(picture.x, bar[0] + bar[2] / 2) == pytest.approx(0, abs=0.01)
    assert picture.title == "No error: all 500 elements are exact"


def test_the_density_has_the_cells_given() -> None:
    entries = [
        (0, 0, 3),
        (1, 1, 300),
        (2, 1, 300),
        (3, 1, 300),
        (3, 2, 40),
        (39, 39, 1),
        (20, 0, 9),
    ]
    picture = cells(*(n for cell in entries for n in cell))
    parsed = Drawn(density(picture))  # type: ignore[arg-type]
    drawn_cells = {}
    for path in parsed.data.iter("path"):
        if "data-from" not in path.attrib:
            continue
        for x, y, long in re.findall(r"M(\d+) (\d+)h(\d+)", path.attrib["d"]):
            for column in range(int(x), int(x) + int(long)):
                drawn_cells[column, int(y)] = int(path.attrib["data-from"])
    bounds = shades(300)
    assert drawn_cells == {(x, y): max(b for b in bounds if b <= count) for x, y, count in entries}
    heat = next(g for g in parsed.data.iter("g") if "transform" in g.attrib)
    start, bottom, wide, high = (
        float(n) for n in re.findall(r"-?\d+\.?\d*", heat.attrib["transform"])
    )
    # A cell's middle, through the transformation and back through the axes.
    for cell in (0, 13, 39):
        value = math.sinh(4.0 * (2 * cell + 1 - 40) / 40)
        assert value_at(parsed.x, start + wide * (cell + 0.5)) == pytest.approx(value, rel=0.01)
        assert value_at(parsed.y, bottom + high * cell) == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(
    ("most", "bounds"),
    [(1, [1]), (2, [1]), (3, [1, 3]), (250, [1, 3, 10, 30, 100]), (5000, [1, 10, 100, 1000]), (10**9, [1, 100, 10**4, 10**6, 10**8])],
)  # fmt: skip
def test_shades_are_few_and_round(most: int, bounds: list[int]) -> None:
    assert shades(most) == bounds


def test_channels_have_the_shares_given() -> None:
    picture = Drawn(worst_channels(errors()))  # type: ignore[arg-type]
    (d,) = picture.paths(fill="--orange")
    bars = boxes(d)
    assert near(
        [value_at(picture.x, x + wide) for x, _, wide, _ in bars], [0.3, 0.15, 0.1], floor=0.002
    )
    assert {"channel 17", "channel 3", "channel 90", "0.012", "no energy"} <= set(picture.words)


def test_octaves_have_the_shares_given() -> None:
    picture = errors()
    parsed = Drawn(error_by_magnitude(picture))  # type: ignore[arg-type]
    octaves = picture["octaves"]
    (bars,) = parsed.paths(data_bars="error")
    assert near([value_at(parsed.y, y) for _, y, *_ in boxes(bars)], octaves["error"], floor=0.003)
    (line,) = parsed.paths(data_line="energy")
    steps = [
        (value_at(parsed.x, x), value_at(parsed.y, y)) for x, y in places(line.replace("L", "M"))
    ]
    assert near([y for _, y in steps[::2]], octaves["energy"], floor=0.003)
    assert near([x for x, _ in steps[::2]], [-3, -2, -1, 0, 1], floor=0.03)


# Sweeps and magnitudes -------------------------------------------------------------------------


def test_the_curve_has_the_levels_given_and_its_marks() -> None:
    levels = [(-4.0, 0.0), *CURVE]
    picture = Drawn(sweep_curve(sweep(levels, -1.0, 1.0)))  # type: ignore[arg-type]
    (line,) = picture.paths(stroke="--blue", stroke_width="1.4")
    assert near(picture.line(line), CURVE, floor=0.03)
    (dots,) = picture.paths(stroke="--blue", stroke_linecap="round")
    assert near(
        [(value_at(picture.x, x), value_at(picture.y, y)) for x, y in places(dots)],
        levels,
        floor=0.03,
    )
    (star,) = picture.paths(fill="--green")
    (diamond,) = picture.paths(fill="--orange")
    assert picture.line(star[: star.index("m")]) == [pytest.approx((-1.0, 2.5e-4), rel=0.03)]
    assert picture.line(diamond[: diamond.index("m")]) == [pytest.approx((1.0, 8e-3), rel=0.03)]
    assert {"★ recommended", "◆ accepted"} <= set(picture.words)


@pytest.mark.parametrize("accepted", [None, -10.5, 11.5, 12.0])
@pytest.mark.parametrize("name", ["e4m3", "mxfp8_e4m3 per 32 channel"])
def test_the_finding_of_a_curve_is_never_cut(name: str, accepted: float | None) -> None:
    levels = [(-10.5, 1.234e-10), (11.5, 2.345e-8)]
    picture = sweep(levels, -10.5, accepted) | {"format": name}
    parsed = Drawn(sweep_curve(picture))  # type: ignore[arg-type]
    assert parsed.title == sweep_finding(picture)  # type: ignore[arg-type]


def test_magnitudes_have_the_counts_and_the_range_given() -> None:
    picture = Drawn(magnitude_histogram(magnitudes()))  # type: ignore[arg-type]
    (bars,) = picture.paths(data_bars="counts")
    assert near(
        [value_at(picture.y, y) for _, y, *_ in boxes(bars)], [1, 20, 300, 4000, 2000, 7], rel=0.05
    )
    assert near(
        [value_at(picture.x, x) for x, *_ in boxes(bars)], [-4, -3, -2, -1, 0, 2], floor=0.05
    )
    (lines,) = picture.paths(stroke="--red")
    assert near([value_at(picture.x, x) for x, _ in places(lines)], [-2.0, 1.81], floor=0.03)
    assert {"0.3 % flushed", "0.1 % clipped", "zeros 0.2 %"} <= set(picture.words)


def test_octaves_too_many_to_draw_are_summed() -> None:
    counts = [1 + at % 5 for at in range(2098)]
    picture = Drawn(magnitude_histogram(magnitudes(low=-1074, counts=counts)))  # type: ignore[arg-type]
    (bars,) = picture.paths(data_bars="counts")
    heights = [value_at(picture.y, y) for _, y, *_ in boxes(bars)]
    assert near(heights, [sum(counts[at : at + 16]) for at in range(0, 2098, 16)], rel=0.05)
    assert "elements in 16 octaves" in picture.words


# Findings --------------------------------------------------------------------------------------

DIAGONAL = [n for at in range(40) for n in (at, at, 50)]
FINDINGS: dict[Callable[[Any], str], list[tuple[Picture, str]]] = {
    _errors.histogram_finding: [
        (bins([0, 74, 10, 26, 0]), "Errors are on both sides: 74 % below zero"),
        (bins([0, 75, 10, 25, 0]), "Errors are one-sided: 75 % below zero"),
        (bins([0, 20, 10, 80, 0]), "Errors are one-sided: 80 % above zero"),
        (bins([0, 0, 10, 60, 0], below=40), "36 % of errors are beyond ±1"),
        (bins([0, 0, 10, 60, 0], below=60), "46 % of errors are beyond ±1"),
        (bins([0, 300, 10, 300, 0], below=6), "Errors are on both sides: 50 % below zero"),
        (bins([0, 300, 10, 300, 0], below=7), "1.1 % of errors are beyond ±1"),
        (bins([0, 20, 960, 20, 0]), "96 % of errors are within ±0.2 of zero"),
        # Exact elements lie right of zero where there is no bin around it.
        (bins([0, 100, 0, 900, 100, 0]), "Errors are on both sides: 50 % above zero"),
        (bins([0, 10, 5, 4, 0]), "Only 19 elements: 10 errors below zero, 4 above"),
        (bins([0, 0, 1, 0, 0]), "Only 1 element: 0 errors below zero, 0 above"),
        (bins([0], edge=0.0), "No errors: nothing was compared"),
        (bins([5, 5]) | {"sampled": 12}, "2 of 12 elements cannot be compared: not finite"),
    ],
    _errors.density_finding: [
        (cells(*DIAGONAL), "Actual follows the reference: 100 % near the diagonal"),
        (cells(*DIAGONAL, 30, 33, 222), "Actual follows the reference: 90 % near the diagonal"),
        (cells(*DIAGONAL, 30, 33, 230), "Actual strays: only 90 % near the diagonal"),
        (cells(*DIAGONAL, 5, 35, 20), "Actual follows the reference: 99 % near the diagonal"),
        (cells(*DIAGONAL, 5, 35, 30), "1.5 % of values have the wrong sign"),
        (cells(*(min(n, 33) if k % 3 == 1 else n for k, n in enumerate(DIAGONAL[45:]))), "Actual ends at 8.2 rms, the reference at 27"),
        (cells(*(min(n, 33) if k % 3 == 0 else n for k, n in enumerate(DIAGONAL[45:]))), "Actual reaches 27 rms, the reference only 8.2"),
        (cells(1, 20, 5, 39, 20, 5), "Actual is zero, or near it, everywhere"),
        (cells(1, 38, 5, 39, 38, 5), "Actual is constant, near 20 rms everywhere"),
        (cells(20, 39, 5, rms=0.0), "The reference is zero, actual is not"),
        (cells(20, 20, 5, rms=0.0), "Actual and reference are zero"),
    ],
    _errors.channels_finding: [
        (shares(0.3, 0.15, 0.1), "Half of the error is in 3 of 128 channels"),
        (shares(0.3, 0.15, 0.1, count=24), "Half of the error is in 3 of 24 channels"),
        (shares(0.3, 0.15, 0.1, count=23), "No channel stands out: the worst of 23 holds 30 % of the error"),
        (shares(0.3, 0.1, 0.05), "No channel stands out: the worst of 128 holds 30 % of the error"),
        (shares(0.95, 0.03, count=4), "95 % of the error is in 1 of 4 channels"),
        (shares(0.89, 0.03, count=4), "No channel stands out: the worst of 4 holds 89 % of the error"),
        (shares(1.0, count=1), "All error is in the only channel"),
        (shares(0.0, 0.0), "No error in any of 128 channels"),
    ],
    _errors.magnitude_finding: [
        (octaves([0.5, 0.5], [0.5, 0.5]), "Error spreads over magnitudes as the energy does"),
        (octaves([0.29, 0.71], [0.0, 1.0]), "Error spreads over magnitudes as the energy does"),
        (octaves([0.31, 0.69], [0.0, 1.0]), "Error sits in small values: 31 % of it below 0.25 rms, where 0 % of the energy is"),
        (octaves([0.1, 0.9], [0.6, 0.4]), "Error sits in large values: 90 % of it above 0.25 rms, where 40 % of the energy is"),
        (octaves([0.0, 0.0], [0.6, 0.4]), "No error at any magnitude"),
        (octaves([1.0, 0.0], [0.0, 0.0]), "The reference is zero: all error is at zero"),
    ],
    sweep_finding: [
        (sweep(CURVE, -1.0, None), "e4m3: recommended scale 2⁻¹, MSE 2.5e-4"),
        (sweep(CURVE, -1.0, -1.0), "e4m3: accepted scale 2⁻¹ is recommended, MSE 2.5e-4"),
        (sweep(CURVE, -1.0, 0.0), "e4m3: scale 2⁻¹ has 2 times less error than accepted 2⁰"),
        (sweep([(0.0, 1.0), (1.0, 1.99)], 0.0, 1.0), "e4m3: scale 2⁰ has 50 % less error than accepted 2¹"),
        (sweep([(0.0, 1.0), (1.0, 1.01)], 0.0, 1.0), "e4m3: scale 2⁰ is no better than accepted 2¹"),
        (sweep([(0.0, 1.0), (1.0, 1.03)], 0.0, 1.0), "e4m3: scale 2⁰ has 3 % less error than accepted 2¹"),
        (sweep(CURVE, -1.0, 7.0), "e4m3: scale 2⁻¹ is recommended, not 2⁷, MSE 2.5e-4"),
        (sweep([(0.0, 0.0), (1.0, 1.0)], 0.0, 1.0), "e4m3: scale 2⁰ is exact, accepted 2¹ is not"),
        (sweep([(0.0, 0.0), (1.0, 0.0)], 0.0, 1.0), "e4m3: accepted scale 2¹ is exact, as is 2⁰"),
    ],
    magnitudes_finding: [
        (magnitudes() | {}, "e4m3 clips 0.1 % and flushes 0.3 % to zero"),
        (magnitudes() | {"flushed": 0}, "e4m3 clips 0.1 %"),
        (magnitudes() | {"saturated": 0, "flushed": 0}, "e4m3 holds all magnitudes: none clipped, none flushed"),
        (magnitudes() | {"saturated": 0, "nonfinite": 1}, "e4m3 flushes 0.3 % to zero; 1 is not finite"),
        (magnitudes() | {"saturated": 0, "flushed": 0, "largest": None, "smallest": None}, "Magnitudes span 7 octaves"),
        (magnitudes() | {"saturated": 0, "flushed": 0, "counts": [0]}, "All values are zero"),
    ],
    divergence_finding: [
        (along(), "The divergence grows 64 times from the first 8 tokens to the last"),
        (along(kl=[0.02, 0.1, 0.1, 0.01]), "The divergence falls 2 times from the first 8 tokens to the last"),
        (along(kl=[0.0, 0.1, 0.1, 0.0]), "The divergence is zero in parts of the text"),
    ],
    loss_finding: [
        (along(), "Stops predicting at token 16 of 32"),
        (along(bits=[1.0, 3.0, 1.0, 1.2]), "Predicts as the reference to the end, 32 tokens"),
        (along(bits=[3.0, 3.0, 3.0, 3.0]), "Stops predicting at token 0 of 32"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("finding", "picture", "title"),
    [
        pytest.param(finding, picture, title, id=title)
        for finding, cases in FINDINGS.items()
        for picture, title in cases
    ],
)
def test_a_plot_says_what_it_shows(
    finding: Callable[[Any], str], picture: Picture, title: str
) -> None:
    assert finding(picture) == title


# Growth ----------------------------------------------------------------------------------------


def test_growth_has_the_errors_given_with_gaps_and_zeros() -> None:
    carried, local = [0.0, 1e-4, None, 3e-3, 4e-3], [0.0, 1e-4, 2e-4, None, 1e-5]
    picture = Drawn(error_growth([growth("2-1", carried, local)]))
    solid, dashed = (
        next(
            p.attrib["d"] for p in picture.data.iter("path") if ("stroke-width" in p.attrib) == wide
        )
        for wide in (True, False)
    )
    for d, values in ((solid, carried), (dashed, local)):
        expected = [(at, value) for at, value in enumerate(values) if value is not None]
        assert near(picture.line(d), expected, floor=0.02)
        assert d.count("M") == 2
    assert picture.y.zero is not None
    assert {"0", "1", "2", "3", "4", "layers.N", "carried", "local"} <= set(picture.words)


def test_growth_of_many_modes_highlights_the_worst_and_stays_bounded() -> None:
    lines = [growth(f"mode {at}", [10.0 ** (at / 10 - 5)] * 96) for at in range(35)]
    begun = time.thread_time()
    svg = error_growth(lines)
    assert time.thread_time() - begun < 1
    picture = Drawn(svg)
    assert "31 other modes" in picture.words
    assert [f"mode {at}" in picture.words for at in (34, 33, 32, 31, 30)] == [True] * 4 + [False]
    assert len(svg) < 40_000
    numbers = [int(word) for word in picture.words if word.isdecimal()]
    assert {0, 95} <= set(numbers)
    assert len(numbers) < 15


def test_growth_of_far_too_much_is_bounded() -> None:
    lines = [growth(f"mode {at}", [1e-3 * (1 + k % 7) for k in range(500)]) for at in range(100)]
    assert len(error_growth(lines)) < 300_000


def test_layers_of_modes_are_put_into_one_order() -> None:
    lines = [
        Growth("m", "a", ("l.0", "l.1", "l.1", "l.3"), (1, 2, 3, 4), (None,) * 4),
        Growth("m", "b", ("l.1", "l.2", "l.3"), (5, 6, 7), (None,) * 3),
    ]
    layers, rows = align_layers(lines)
    assert layers == ["l.0", "l.1", "l.2", "l.1", "l.3"] or layers == [
        "l.0",
        "l.1",
        "l.1",
        "l.2",
        "l.3",
    ]
    values_by_mode = {
        row.name: [value for value in row.values if value is not None] for row in rows
    }
    assert values_by_mode == {"a": [1, 2, 3, 4], "b": [5, 6, 7]}
    assert [row.name for row in rows] == ["b", "a"]


def test_layers_are_named_by_what_differs() -> None:
    texts, _, name = layer_names(["embed", *(f"model.layers.{at}" for at in range(3)), "norm"], 20)
    assert texts == ["embed", "0", "1", "2", "norm"]
    assert name == "model.layers.N"
    assert layer_names(["a", "b"], 20)[2] == "layer"
    detector = [f"model.{part}.layers.{at}" for part in ("encoder", "decoder") for at in range(2)]
    texts, order, name = layer_names([*detector, "outputs"], 20)
    assert texts == ["0", "1", "0", "1", "outputs"]
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert name == "encoder.layers.N, decoder.layers.N"


@pytest.mark.parametrize(
    ("lines", "title"),
    [
        ([growth("2-1", [1e-3, 2e-3, 9e-3])], "2-1 ends at 0.009; no layer alone stands out"),
        ([growth("2-1", [1e-3, 5e-3, 9e-3])], "2-1 ends at 0.009; layers.1 alone multiplies the error by 5"),
        ([growth("2-1", [1e-3])], "2-1 ends at 0.001 after 1 layer"),
        ([growth("2-1", [0.0, 0.0])], "No error at any layer"),
        ([growth("2-1", [None, None])], "No carried errors are known"),
        ([], "No carried errors are known"),
        ([growth("a", [1.0, 0.105]), growth("b", [1.0, 0.1])], "All 2 modes end alike, at 0.105"),
        ([growth("a", [1.0, 0.1]), growth("b", [1.0, 0.4])], "b ends at 0.4, 4 times as much as a"),
        ([growth("a", [1.0, 0.0]), growth("b", [1.0, 0.4])], "b ends at 0.4, a is exact"),
    ],
)  # fmt: skip
def test_growth_says_what_it_shows(lines: list[Growth], title: str) -> None:
    assert growth_finding(lines) == title
    assert Drawn(error_growth(lines)).title == title


# Records ---------------------------------------------------------------------------------------


def test_a_record_has_a_panel_for_everything_it_carries() -> None:
    record = {"pictures": [errors(), sweep(CURVE, -1.0), magnitudes(), along()]}
    drawn_panels, problems = panels_of(json.loads(json.dumps(record)))
    assert not problems
    assert [panel.kind for panel in drawn_panels] == [
        name for kind in panels.PICTURE_KINDS.values() for name, *_ in kind.panels
    ]
    for panel in drawn_panels:
        assert Drawn(panel.svg).title == panel.title


def test_what_has_nothing_to_draw_has_no_panel() -> None:
    bare = cells(rms=0.0)
    del bare["channels"]
    drawn_panels, problems = panels_of({"pictures": [bare]})
    assert [panel.kind for panel in drawn_panels] == ["error_histogram", "error_by_magnitude"]
    assert not problems
    assert panels_of({}) == ([], [])
    assert panels_of({"pictures": None}) == ([], [])
    assert panels_of({"pictures": "x"})[1] == ["the pictures of this record are no list"]
    assert len(panels_of({"pictures": [sweep(CURVE, 0.0)] * 50})[0]) == panels.MOST


def damaged() -> list[tuple[str, Picture]]:
    """Every value of every kind of picture replaced by what does not belong there, or left out."""
    pictures: list[tuple[str, Picture]] = []

    def visit(picture: Picture, at: tuple[Any, ...], value: Any) -> None:
        for bad in (
            None,
            "x",
            True,
            [],
            {},
            -1,
            math.nan,
            math.inf,
            1e308,
            10**400,
            [None],
            HOSTILE,
        ):
            changed = copy.deepcopy(picture)
            target: Any = changed
            for key in at[:-1]:
                target = target[key]
            target[at[-1]] = bad
            pictures.append((f"{at}={bad!r}"[:60], changed))
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()  # fmt: skip
        for key, inner_value in list(inner)[:12]:
            visit(picture, (*at, key), inner_value)

    for picture in (errors(), sweep(CURVE, -1.0, 1.0), magnitudes(), along()):
        for key, value in picture.items():
            visit(picture, (key,), value)
            pictures.append((f"no {key}", {k: v for k, v in picture.items() if k != key}))
    return pictures


def test_damaged_pictures_give_a_reason_or_a_picture_but_no_exception() -> None:
    with_problems = 0
    for name, picture in damaged():
        drawn_panels, problems = panels_of({"pictures": [picture]})
        assert drawn_panels or problems, name
        with_problems += bool(problems)
        for panel in drawn_panels:
            svg = panel.svg
            assert "nan" not in svg, name
            assert len(svg) < 60_000, name
            ET.fromstring(svg)
        assert all(problem.isprintable() and len(problem) < 200 for problem in problems)
    assert with_problems > 300


@pytest.mark.parametrize(
    "picture",
    [
        errors(bins={"edge": 1e300, "counts": [1 << 62] * 512, "below": 1 << 62, "above": 0}),
        errors(bins={"edge": 1e-320, "counts": [1] * 41, "below": 0, "above": 0}),
        errors(density={"size": 128, "edge": 700.0, "cells": [n for c in range(128) for r in range(128) for n in (c, r, 1 + (c * r) % 997)]}),
        errors(octaves={"low": -2000, "error": [1e-4] * 2200, "energy": [1e-4] * 2200, "elements": [1] * 2200}),
        errors(channels=[{"index": 1 << 60, "share": 1.0, "relative_mse": 1e300}] * 1000, channel_count=0),
        sweep([(k / 16, 10.0 ** ((k % 600) - 300)) for k in range(1000)], 1e4, -1e4),
        magnitudes(low=-3000, counts=[1 << 62] * 2200, largest=3000.0, smallest=-3000.0),
    ],
)  # fmt: skip
def test_the_largest_pictures_are_bounded(picture: Picture) -> None:
    begun = time.thread_time()
    drawn_panels, problems = panels_of({"pictures": [picture]})
    assert time.thread_time() - begun < 2
    assert drawn_panels
    assert not problems
    for panel in drawn_panels:
        ET.fromstring(panel.svg)
        assert len(panel.svg) < 130_000
