"""All pictures of a dump: where each lies and who draws it. A new one is a new line."""

from __future__ import annotations

from dataclasses import dataclass

from qgate.charts.sheet import Drawing
from qgate.drawing.plots import attention as dump_attention
from qgate.drawing.plots import backward as dump_backward
from qgate.drawing.plots import bf16 as dump_bf16
from qgate.drawing.plots import comparisons as dump_comparisons
from qgate.drawing.plots import distributions as dump_distributions
from qgate.drawing.plots import fp8 as dump_fp8
from qgate.drawing.plots import heatmaps as dump_heatmaps
from qgate.drawing.plots import layers as dump_layers
from qgate.drawing.plots import overflow as dump_overflow
from qgate.drawing.plots import quantization as dump_quantization
from qgate.drawing.plots import quick as dump_quick
from qgate.drawing.plots import ranks as dump_ranks
from qgate.drawing.plots import statistics as dump_statistics
from qgate.summaries.record import DumpAnalysis


@dataclass(frozen=True)
class DumpPicture:
    """A file below the folder of all, what is in it in general, and what draws it."""

    folder: str
    file: str
    about: str
    draw: Drawing[DumpAnalysis]

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.file}" if self.folder else self.file


def _in(folder: str, *rows: tuple[str, str, Drawing[DumpAnalysis]]) -> tuple[DumpPicture, ...]:
    return tuple(DumpPicture(folder, f"{name}.png", about, draw) for name, about, draw in rows)


PICTURES: tuple[DumpPicture, ...] = (
    *_in("", ("quick_analysis", "The overview on one page.", dump_quick.draw_quick)),
    *_in(
        "distributions",
        (
            "magnitudes",
            "Magnitudes of each kind of tensor, with the ranges of formats.",
            dump_distributions.draw_magnitudes,
        ),
        ("boxes", "Quartiles and extremes in standard deviations.", dump_distributions.draw_boxes),
        (
            "normal_quantiles",
            "Quantiles against those of a normal distribution.",
            dump_distributions.draw_normal_quantiles,
        ),
    ),
    *_in(
        "heatmaps",
        ("amax", "Largest magnitudes by layer and kind of tensor.", dump_heatmaps.draw_amax),
        ("saturated", "What casts saturate, by layer.", dump_heatmaps.draw_saturated),
        ("flushed", "What becomes zero, by layer and format.", dump_heatmaps.draw_flushed),
        ("tokens", "Tensors as maps of tokens and channels.", dump_heatmaps.draw_tokens),
    ),
    *_in(
        "comparisons",
        ("sqnr_by_layer", "SQNR by layer and format.", dump_comparisons.draw_sqnr_by_layer),
        (
            "sqnr_by_crest",
            "SQNR against how far the largest value stands out.",
            dump_comparisons.draw_sqnr_by_crest,
        ),
        (
            "quant_types",
            "Magnitudes of quant types side by side.",
            dump_comparisons.draw_quant_types,
        ),
    ),
    *_in(
        "statistics",
        (
            "overview",
            "Mean, standard deviation and kurtosis of each kind.",
            dump_statistics.draw_overview,
        ),
        (
            "channels",
            "Channels by largest magnitude, outliers named.",
            dump_statistics.draw_channels,
        ),
    ),
    *_in(
        "attention_analysis",
        ("layers", "Query, key, value and context by layer.", dump_attention.draw_attention_layers),
        ("maps", "Where attention goes.", dump_attention.draw_attention_maps),
        (
            "focus",
            "Entropy and share of the first key by layer.",
            dump_attention.draw_attention_focus,
        ),
    ),
    *_in(
        "quantization_analysis",
        (
            "boxes",
            "Mean, standard deviation and largest magnitude by quant type.",
            dump_quantization.draw_type_boxes,
        ),
        ("losses", "What formats lose on each quant type.", dump_quantization.draw_losses),
        (
            "saturation",
            "What saturation costs in formats that saturate by design.",
            dump_quantization.draw_saturation,
        ),
    ),
    *_in(
        "layer_analysis",
        ("layer_types", "Types of layers side by side.", dump_layers.draw_layer_types),
        ("depth", "Magnitudes and kurtosis by layer.", dump_layers.draw_depth),
        ("samples", "Differences between samples.", dump_layers.draw_samples),
        ("batches", "Differences by the first dimension.", dump_layers.draw_batches),
    ),
    *_in(
        "overflow_analysis",
        ("nonfinite", "Values that are not finite, by kind.", dump_overflow.draw_nonfinite),
        ("worst_tensors", "The tensors that overflow worst.", dump_overflow.draw_worst),
        ("by_quant_type", "What saturates, by quant type.", dump_overflow.draw_by_quant_type),
        ("by_layer_type", "What saturates, by type of layer.", dump_overflow.draw_by_layer_type),
        ("upper_lower", "Saturation above against below.", dump_overflow.draw_upper_lower),
        (
            "share_histogram",
            "How many tensors saturate how much.",
            dump_overflow.draw_share_histogram,
        ),
    ),
    *_in(
        "fp8_analysis",
        ("histograms", "Values of both on one axis.", dump_fp8.draw_pair_histograms),
        ("boxes", "Statistics of the tensors of both.", dump_fp8.draw_pair_boxes),
        ("scatter", "The same values in both.", dump_fp8.draw_scatter),
        ("fits", "Fits of known distributions.", dump_fp8.draw_fits),
        ("sqnr", "SQNR of each tensor in both formats.", dump_fp8.draw_pair_sqnr),
        ("pairs", "How far the same tensors are apart, by layer.", dump_fp8.draw_pairs),
    ),
    *_in(
        "bf16_analysis",
        ("density", "Densities, original and normalized.", dump_bf16.draw_density),
        ("usage", "Exponents and numbers of bf16 that occur.", dump_bf16.draw_usage),
        ("moments", "Variance, skew and kurtosis of each kind.", dump_bf16.draw_moments),
    ),
    *_in(
        "backward_analysis",
        (
            "forward_backward",
            "Magnitudes of gradients against those of forward tensors.",
            dump_backward.draw_directions,
        ),
        ("gradients", "Gradients by type of layer and by name.", dump_backward.draw_gradients),
        (
            "gradient_flush",
            "Gradients that become zero, by format.",
            dump_backward.draw_gradient_flush,
        ),
        ("loss_scale", "Loss scales that would save gradients.", dump_backward.draw_loss_scale),
    ),
    *_in(
        "rank_analysis",
        (
            "tensors",
            "Root mean squares of each rank against the median rank.",
            dump_ranks.draw_rank_tensors,
        ),
        ("scores", "How far each rank is from the others.", dump_ranks.draw_rank_scores),
    ),
)


def picture_at(path: str) -> DumpPicture:
    return next(picture for picture in PICTURES if picture.path == path)


def by_folder(folder: str) -> tuple[DumpPicture, ...]:
    return tuple(picture for picture in PICTURES if picture.folder == folder)
