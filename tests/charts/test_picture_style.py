"""All registered pictures are of one style, and their drawn data is that of the record."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qgate.activation_stats.plots.pictures import pictures
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import PANEL, SMALL, TICK, dress, new_figure, number_names, render_image
from qgate.charts.palette import BLUE, COLORS
from qgate.charts.sheet import Sheet, sheet
from qgate.drawing.plots.pictures import PICTURES as DUMPS
from qgate.sweeps.plots import PICTURES as SWEEPS
from tests.activation_stats import activation_records
from tests.charts.picture_style import has_data, violations
from tests.drawing import dump_records
from tests.shares import proof, share
from tests.sweeps import sweep_records

Build = Callable[[], Sheet | None]
KEPT = Path(__file__).parent / "stored_pictures"


def _registered() -> Iterator[tuple[str, Build]]:
    for record in sweep_records.realistic():
        for sweep in SWEEPS:
            if sweep.kind == record["kind"]:
                yield f"sweeps/{sweep.stem}", lambda s=sweep, r=record: s.draw.build(r)
    for dump in DUMPS:
        yield f"dumps/{dump.path}", lambda d=dump: d.draw.build(_normal_dump())
    for picture in pictures(activation_records.usual(), ViewSettings()):
        yield f"activations/{picture.name}", picture.sheet


@lru_cache
def _normal_dump() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dump_records.normal_record()


REGISTERED = dict(_registered())


@share(32)
@pytest.mark.parametrize("name", REGISTERED)
def test_every_picture_keeps_to_the_style(name: str) -> None:
    with np.errstate(all="ignore"):
        drawing = REGISTERED[name]()
    assert drawing is not None
    assert any(has_data(axes) for axes in drawing.figure.axes)
    assert violations(drawing.figure) == []


@proof
@pytest.mark.parametrize("name", ["tiny", "outlier", "single level", "failed", "odd name"])
def test_sweeps_of_odd_tensors_keep_to_the_style(name: str) -> None:
    record = sweep_records.TENSORS[name]()
    for picture in SWEEPS:
        if picture.kind == "tensor":
            drawing = picture.draw.build(record)
            assert drawing is not None
            assert violations(drawing.figure) == []


# That a deviation is seen --------------------------------------------------------------------------


def _plain() -> Any:
    drawing = sheet(6, 3, "3 points")
    axes = drawing.figure.subplots()
    axes.plot([1, 2, 3], [1, 2, 3], color=BLUE)
    dress(axes, title="a panel", x="layer", y="SQNR (dB)")
    return axes


PLANTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "title": (lambda a: a.figure.suptitle("MSE"), "title: 'MSE' states no finding"),
    "font": (lambda a: a.set_title("small", fontsize=7), "font: 7 pt"),
    "color": (lambda a: a.plot([1, 2], [2, 1], color="#ff00ff"), "color: #ff00ff"),
    "map": (lambda a: a.figure.add_subplot().imshow(np.eye(3), cmap="jet"), "color: map jet"),
    "label": (lambda a: a.set_ylabel(""), "label: y of 'a panel'"),
    "overlap": (
        lambda a: [a.text(2, 2, word, fontsize=TICK) for word in ("this", "that")],
        "overlap: 'this' and 'that'",
    ),
    "legend": (lambda a: a.legend(["a line"], loc="center", fontsize=SMALL), "legend: over"),
    "empty": (lambda a: a.figure.add_axes((0.8, 0.8, 0.1, 0.1)), "empty: "),
}


def test_a_plain_panel_keeps_to_the_style() -> None:
    assert violations(_plain().figure) == []


@share(4)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_deviation_is_seen(name: str) -> None:
    axes = _plain()
    plant, words = PLANTED[name]
    plant(axes)
    assert any(violation.startswith(words) for violation in violations(axes.figure)), words


# What is drawn is what was given -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stem", "places"), [("scaling_test", (0, 3, 4, 5)), ("scaling_summary", (0,))]
)
def test_the_curves_of_a_sweep_are_its_levels(stem: str, places: tuple[int, ...]) -> None:
    record = sweep_records.realistic()[0]
    drawing = next(picture for picture in SWEEPS if picture.stem == stem).draw.build(record)
    assert drawing is not None
    panels = [axes for axes in drawing.figure.axes if has_data(axes)]
    names = ("mse", "cosine", "psnr_db", "mae", "max_abs", "relative_error")
    levels = sorted(record["levels"], key=lambda level: level["exponent"])
    for panel_index in places:
        lines = [np.asarray(line.get_ydata(), dtype=float) for line in panels[panel_index].lines]
        expected = [level["metrics"][names[panel_index]] for level in levels]
        assert any(len(y) == len(expected) and y == pytest.approx(expected) for y in lines)


def test_the_shares_of_a_block_sweep_are_its_levels() -> None:
    record = sweep_records.realistic()[1]
    drawing = SWEEPS[-1].draw.build(record)
    assert drawing is not None
    panel = [axes for axes in drawing.figure.axes if has_data(axes)][2]
    share_by_label = {line.get_label(): line.get_ydata() for line in panel.lines}
    for label, key in (
        ("saturated elements", "overflow_share"),
        ("flushed energy", "flush_energy"),
    ):
        expected = [100 * level[key] for level in record["levels"]]
        assert list(share_by_label[label]) == pytest.approx(expected)


def test_the_loss_map_of_activations_is_the_record() -> None:
    drawing = REGISTERED["activations/sqnr-input"]()
    assert drawing is not None
    record = activation_records.usual()
    down_proj_entries = [
        e for e in record["layers"] if e["role"] == "input" and e["module"].endswith("down_proj")
    ]
    axes = next(a for a in drawing.figure.axes if a.get_title(loc="left") == "nvfp4")
    names = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()]
    cells = axes.images[0].get_array()
    assert cells is not None
    from qgate.activation_stats.reading import losses

    assert list(cells[names.index("mlp.down_proj")]) == pytest.approx(
        [losses(e)["nvfp4"].worse for e in down_proj_entries]
    )


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([0, 0.25, 0.5], ["0", "0.25", "0.5"]),
        ([12000, 12500, 13000], ["12000", "12500", "13000"]),
        ([12345, 13345], ["12345", "13345"]),
        ([1.0001, 1.0002], ["1.0001", "1.0002"]),
        ([-1e-17, 0.1, 0.2], ["0", "0.1", "0.2"]),
        ([0, 2e-7, 4e-7], ["0", "2e-7", "4e-7"]),
        ([1e6, 2e6], ["1e6", "2e6"]),
        ([], []),
    ],
)
def test_ticks_are_named_as_people_write_numbers(values: list[float], names: list[str]) -> None:
    assert (number_names(values) if values else []) == names


# Pictures that are kept ----------------------------------------------------------------------------

BASELINES = (
    "sweeps/scaling_summary",
    "dumps/heatmaps/amax.png",
    "dumps/comparisons/sqnr_by_layer.png",
    "activations/sqnr-input",
    "activations/mlp_down_proj_input-input",
)
DIFFERENT = 2.0
"""Root mean square over all pixels and channels, of 255: other versions of fonts stay below it."""


def _drawn(name: str, change: Callable[[Any], None] | None = None) -> Image.Image:
    drawing = REGISTERED[name]()
    assert drawing is not None
    if change is not None:
        change(drawing.figure)
    return render_image(drawing.figure, 50)


def _kept(name: str) -> Path:
    return KEPT / (re.sub(r"[^a-z0-9]+", "_", name.removesuffix(".png").lower()) + ".png")


def _apart(one: Image.Image, other: Image.Image) -> float:
    """Infinite for pictures of two sizes."""
    if one.size != other.size:
        return float("inf")
    pixels = [np.asarray(image.convert("RGB"), dtype=np.float64) for image in (one, other)]
    return float(np.sqrt(np.mean((pixels[0] - pixels[1]) ** 2)))


@share(3)
@pytest.mark.parametrize("name", BASELINES)
def test_a_picture_equals_its_stored_one(name: str, request: pytest.FixtureRequest) -> None:
    """After looking at it: `python -m tests.charts.test_picture_style` draws them anew."""
    with Image.open(_kept(name)) as stored_image:
        distance = _apart(_drawn(name), stored_image)
    if distance > DIFFERENT:
        drawn_path = request.getfixturevalue("tmp_path") / "drawn.png"
        _drawn(name).save(drawn_path)
        pytest.fail(
            f"{name} differs by {distance:.1f}, {DIFFERENT:g} allowed: compare {drawn_path} with "
            f"{_kept(name)}; python -m tests.charts.test_picture_style keeps what is drawn now"
        )


def _moved(figure: Any) -> None:
    line = max(
        (line for axes in figure.axes for line in axes.lines),
        key=lambda each: len(each.get_xdata()),
    )
    low, high = line.axes.get_ylim()
    y = np.asarray(line.get_ydata(), dtype=float)
    line.set_ydata(y * 3 if line.axes.get_yscale() == "log" else y + 0.2 * (high - low))


def _recolored(figure: Any) -> None:
    figure.axes[0].images[0].set_cmap("gray")


@share(3)
@pytest.mark.parametrize(
    ("name", "change"),
    [(BASELINES[0], _moved), (BASELINES[4], _moved), (BASELINES[1], _recolored)],
)
def test_a_changed_picture_differs_from_its_stored_one(
    name: str, change: Callable[[Any], None]
) -> None:
    with Image.open(_kept(name)) as stored_image:
        assert _apart(_drawn(name, change), stored_image) > DIFFERENT


def test_drawing_twice_gives_the_same_picture() -> None:
    assert _apart(_drawn(BASELINES[3]), _drawn(BASELINES[3])) == 0


def test_colors_and_font_sizes_are_distinct() -> None:
    assert len(set(COLORS)) == len(COLORS) == 8
    assert SMALL >= 8
    assert PANEL >= TICK >= SMALL
    assert new_figure(2, 2).get_facecolor() == (1, 1, 1, 1)


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for each in BASELINES:
        _drawn(each).save(_kept(each), optimize=True)
        print(_kept(each), _kept(each).stat().st_size)
