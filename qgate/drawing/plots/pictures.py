"""All pictures of a dump: path, description and function of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qgate.charts.sheet import Drawing, Sheet
from qgate.drawing.plots import (
    distributions,
    formats,
    layers,
    magnitudes,
    maps,
    overflow,
    pairs,
    quick,
    ranks,
)
from qgate.summaries.reading import cast_names, flushed, format_names, quant_type_of, saturated
from qgate.summaries.record import DumpAnalysis

Build = Callable[[DumpAnalysis], Sheet | None]


@dataclass(frozen=True)
class DumpPicture:
    """A picture in a folder of the drawing, with its description and its drawing function."""

    folder: str
    file: str
    about: str
    draw: Drawing[DumpAnalysis]

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.file}" if self.folder else self.file


_TABLE: dict[str, dict[str, tuple[Build, str]]] = {
    "": {"quick_analysis": (quick.overview, "The overview on one page.")},
    "distributions": {
        "magnitudes": (
            magnitudes.magnitudes,
            "Magnitudes of each kind of tensor, with the ranges of formats.",
        ),
        "boxes": (distributions.boxes, "Quartiles and extremes in standard deviations."),
        "normal_quantiles": (
            distributions.normal_quantiles,
            "Quantiles against those of a normal distribution.",
        ),
    },
    "heatmaps": {
        "amax": (maps.amax, "Largest magnitudes by layer and kind of tensor."),
        "saturated": (
            maps.lost(cast_names, saturated, "of the values saturate"),
            "Values that saturate in a cast, by layer.",
        ),
        "flushed": (
            maps.lost(format_names, flushed, "of the values become zero"),
            "Values that become zero, by layer and format.",
        ),
        "tokens": (maps.tokens, "Tensors as maps of their channels and all other axes."),
    },
    "comparisons": {
        "sqnr_by_layer": (formats.sqnr_by_layer, "SQNR by layer and format."),
        "sqnr_by_crest": (
            formats.sqnr_by_crest,
            "SQNR against how far the largest value stands out.",
        ),
        "quant_types": (magnitudes.quant_types, "Magnitudes of quant types side by side."),
    },
    "statistics": {
        "overview": (
            distributions.overview,
            "Mean, standard deviation and kurtosis of each kind.",
        ),
        "channels": (layers.channels, "Channels by largest magnitude, outliers named."),
    },
    "attention_analysis": {
        "layers": (layers.attention, "Query, key, value and context by layer."),
        "maps": (maps.attention, "Where attention goes."),
        "focus": (maps.focus, "Entropy and share of the first key by layer."),
    },
    "quantization_analysis": {
        "boxes": (
            distributions.type_boxes,
            "Mean, standard deviation and largest magnitude by quant type.",
        ),
        "losses": (formats.losses_by_type, "Losses of formats on each quant type."),
        "saturation": (
            formats.saturation,
            "The cost of saturation in formats that saturate by design.",
        ),
    },
    "layer_analysis": {
        "layer_types": (magnitudes.layer_types, "Types of layers side by side."),
        "depth": (layers.depth, "Magnitudes and kurtosis by layer."),
        "samples": (layers.samples, "Differences between samples."),
        "batches": (layers.batches, "Differences by the first dimension."),
    },
    "overflow_analysis": {
        "nonfinite": (overflow.not_finite, "Values that are not finite, by kind."),
        "worst_tensors": (overflow.worst_tensors, "The tensors that overflow worst."),
        "by_quant_type": (
            overflow.shares_by("quant type", quant_type_of),
            "Values that saturate, by quant type.",
        ),
        "by_layer_type": (
            overflow.shares_by("type of layer", lambda tensor: str(tensor["layer_type"]), 2),
            "Values that saturate, by type of layer.",
        ),
        "upper_lower": (overflow.upper_lower, "Saturation above against below."),
        "share_histogram": (overflow.share_histogram, "How many tensors saturate how much."),
    },
    "fp8_analysis": {
        "histograms": (pairs.histograms, "Values of both on one axis."),
        "boxes": (pairs.boxes, "Statistics of the tensors of both."),
        "scatter": (pairs.scatter, "The same values in both."),
        "fits": (pairs.fits, "Fits of theoretical distributions."),
        "sqnr": (pairs.sqnr, "SQNR of each tensor in both formats."),
        "pairs": (pairs.pairs, "How far the same tensors are apart, by layer."),
    },
    "bf16_analysis": {
        "density": (distributions.density, "Densities, original and normalized."),
        "usage": (distributions.usage, "Exponents and numbers of bf16 that occur."),
        "moments": (distributions.moments, "Variance, skew and kurtosis of each kind."),
    },
    "backward_analysis": {
        "forward_backward": (
            magnitudes.forward_backward,
            "Magnitudes of gradients against those of forward tensors.",
        ),
        "gradients": (magnitudes.gradients, "Gradients by type of layer and by name."),
        "gradient_flush": (formats.gradient_flush, "Gradients that become zero, by format."),
        "loss_scale": (formats.loss_scale, "Loss scales that would save gradients."),
    },
    "rank_analysis": {
        "tensors": (ranks.tensors, "Root mean squares of each rank against the median rank."),
        "scores": (ranks.scores, "How far each rank is from the others."),
    },
}

PICTURES: tuple[DumpPicture, ...] = tuple(
    DumpPicture(folder, f"{name}.png", about, Drawing(build))
    for folder, rows in _TABLE.items()
    for name, (build, about) in rows.items()
)


def picture_at(path: str) -> DumpPicture:
    return next(picture for picture in PICTURES if picture.path == path)
