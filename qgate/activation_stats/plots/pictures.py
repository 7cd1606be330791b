"""All pictures of activations in the order of the report: section, name of the file, what draws."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qgate.activation_stats.plots.distributions import draw_boxes, draw_histograms
from qgate.activation_stats.plots.formats import (
    draw_alphas,
    draw_losses,
    draw_proposal,
    draw_sensitivity,
    draw_smoothing,
)
from qgate.activation_stats.plots.heatmaps import draw_flat, draw_surface, map_layers
from qgate.activation_stats.plots.magnitudes import draw_magnitudes
from qgate.activation_stats.plots.outliers import (
    draw_outlier_channels,
    draw_outlier_counts,
    draw_outlier_positions,
    draw_outlier_tokens,
)
from qgate.activation_stats.plots.ranges import draw_range, draw_ranges, range_layers
from qgate.activation_stats.reading import Look, clean, digest, stems
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.charts.figure import rendered, save
from qgate.charts.sheet import Sheet

if TYPE_CHECKING:
    from PIL.Image import Image

_PAGE_DPI, _PAGE_WIDTH = 100, 1300


@dataclass(frozen=True)
class ActivationPicture:
    """One picture: its file without the model's name and without an ending."""

    section: str
    name: str
    about: str
    build: Callable[[], Sheet | None]

    def sheet(self) -> Sheet | None:
        with np.errstate(all="ignore"):
            return self.build()


def pictures(record: ActivationsRecord, look: Look) -> list[ActivationPicture]:
    """Each has a name of its own."""
    found = list(_all(record, look))
    seen: dict[str, int] = {}
    for each in found:
        seen[each.name.lower()] = seen.get(each.name.lower(), 0) + 1
    twice = [name for name, count in seen.items() if count > 1]
    if twice:
        raise AssertionError(f"pictures of one name: {', '.join(twice)}")
    return found


def _all(record: ActivationsRecord, look: Look) -> Iterator[ActivationPicture]:
    panels = record["panels"]
    names = stems(dict.fromkeys(pattern for kind in panels.values() for pattern in kind))
    yield from _outliers(record, look)
    for role in ("input", "output", "weight"):
        about = (
            f"SQNR of the {role} in each format, the worse of with and without massive elements."
        )
        yield ActivationPicture(
            "formats", f"sqnr-{role}", about, partial(draw_losses, record, role, look)
        )
    yield from _sensitivity(record, look)
    if any("smoothing" in each for each in record["layers"]):
        about = "Difficulty moved from activations to weights; what it is predicted to gain."
        yield ActivationPicture(
            "smoothing", "smoothing-alpha", about, partial(draw_alphas, record, look)
        )
        yield ActivationPicture(
            "smoothing", "smoothing-gain", about, partial(draw_smoothing, record, look)
        )
    for role, ending in (
        ("input", "_input-input"),
        ("output", "_output-output"),
        ("weight", "-weight"),
    ):
        patterns = list(panels.get(f"magnitude_{role}", {}))
        parts = {"combined": patterns} if look.combined_plot and patterns else {}
        for name, mine in (parts or {names[p]: [p] for p in patterns}).items():
            about = f"Magnitudes of each layer's {role}; {', '.join(mine)}"
            yield ActivationPicture(
                "magnitude",
                f"{name}{ending}",
                about,
                partial(draw_magnitudes, record, role, mine, look),
            )
    for pattern in panels.get("distribution", {}):
        if "boxplot" in look.plot_types:
            yield ActivationPicture(
                "distribution",
                f"{names[pattern]}-distribution",
                pattern,
                partial(draw_boxes, record, pattern, look),
            )
        if "histogram" in look.plot_types:
            yield ActivationPicture(
                "distribution",
                f"{names[pattern]}-histogram",
                pattern,
                partial(draw_histograms, record, pattern, look),
            )
    yield from _ranges(record, look, names)
    for place, layer in enumerate(map_layers(record, look)):
        if place == 0:
            yield ActivationPicture(
                "heatmap", "heatmap-heatmap-3d", layer["module"], partial(draw_surface, layer, look)
            )
        if place < look.flat_layers:
            yield ActivationPicture(
                "heatmap",
                f"heatmap-heatmap-2d-layer{place}",
                layer["module"],
                partial(draw_flat, layer, look),
            )


def _outliers(record: ActivationsRecord, look: Look) -> Iterator[ActivationPicture]:
    if not record["panels"].get("outliers"):
        return
    if look.layer_wise:
        about = "Outlier tokens of each layer, by the known rule."
        yield ActivationPicture(
            "outliers", "outlier-count", about, partial(draw_outlier_counts, record, look)
        )
    if look.position:
        about = "Where in the sequence they are."
        yield ActivationPicture(
            "outliers", "outlier-position", about, partial(draw_outlier_positions, record, look)
        )
    if look.token:
        about = "Which tokens they are."
        yield ActivationPicture(
            "outliers", "outlier-token", about, partial(draw_outlier_tokens, record, look)
        )
    about = "Channels that stand out, and single massive activations."
    yield ActivationPicture(
        "outliers", "outlier-channel", about, partial(draw_outlier_channels, record, look)
    )


def _sensitivity(record: ActivationsRecord, look: Look) -> Iterator[ActivationPicture]:
    for name in dict.fromkeys(each["format"] for each in record["sensitivity"]):
        about = f"Each layer quantized alone in {name}."
        yield ActivationPicture(
            "sensitivity",
            f"sensitivity-{clean(name)}",
            about,
            partial(draw_sensitivity, record, name, look),
        )
        yield ActivationPicture(
            "sensitivity",
            f"sensitivity-{clean(name)}-proposal",
            about,
            partial(draw_proposal, record, name, look),
        )


def _ranges(
    record: ActivationsRecord, look: Look, names: dict[str, str]
) -> Iterator[ActivationPicture]:
    role = "input" if look.percentile_input else "output"
    line = "-line" if look.style == "line" else ""
    for pattern in record["panels"].get("percentile_range", {}):
        layers = range_layers(record, pattern, look)
        for layer, label in zip(layers, _labels(layers), strict=True):
            yield ActivationPicture(
                "percentiles",
                f"{label}-{names[pattern]}-{role}-percentile{line}",
                layer["module"],
                partial(draw_range, layer, look),
            )
        yield ActivationPicture(
            "percentiles",
            f"{names[pattern]}-{role}-percentile-multi",
            pattern,
            partial(draw_ranges, record, pattern, look),
        )


def _labels(layers: list[LayerActivations]) -> list[str]:
    """Numbers of layers; names, where numbers do not tell them apart."""
    told = [each["layer"] for each in layers]
    if None not in told and len(set(told)) == len(told):
        return [str(number) for number in told]
    named = [clean(each["module"]) for each in layers]
    return [
        name if named.count(name) == 1 else f"{name}-{digest(each['module'])}"
        for name, each in zip(named, layers, strict=True)
    ]


# Files -------------------------------------------------------------------------------------------


def write(sheet: Sheet, paths: list[Path], *, dpi: int, page: bool) -> tuple[bytes, int, int]:
    """The files, and a smaller picture for the page with its size, if there is one."""
    image = None
    for path in paths:
        if path.suffix == ".png" and image is None:
            image = rendered(sheet.figure, dpi)
        save(sheet.figure, path, dpi=dpi, image=image)
    if not page:
        return b"", 0, 0
    if image is None or not 90 <= dpi <= 400:
        image = rendered(sheet.figure, _PAGE_DPI)
    return _small(image)


def _small(image: Image) -> tuple[bytes, int, int]:
    """At most so wide and in few colors: a page has dozens of them."""
    from PIL import Image as Images

    if image.width > _PAGE_WIDTH:
        height = round(image.height * _PAGE_WIDTH / image.width)
        image = image.resize((_PAGE_WIDTH, height), Images.Resampling.HAMMING)
    made = io.BytesIO()
    few = image.quantize(192, method=Images.Quantize.FASTOCTREE, dither=Images.Dither.NONE)
    few.save(made, format="png")
    return made.getvalue(), image.width, image.height
