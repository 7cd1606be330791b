"""Figures of a model before quantization: sizes, quality of prediction, outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.capture.next_tokens import predicts_next_tokens
from qgate.capture.running import next_token_loss, pass_through
from qgate.models import Model, Site
from qgate.models.rows import token_ids
from qgate.models.task_metric import metric_name, task_figures
from qgate.modes.calibration import quantile

OUTLIER = 8.0


@dataclass(frozen=True)
class SiteFigures:
    """The magnitudes at one site over all samples.

    `clipped` is the largest magnitude over the 0.9995 quantile: the factor a percentile clips.
    `peak` is the largest channel maximum over the median one, `outliers` how many channels have a
    maximum above eight times that median.
    """

    site: str
    largest: float
    clipped: float
    peak: float
    outliers: int


@dataclass(frozen=True)
class ModelFigures:
    """Sizes and figures of a model on its own samples.

    `task` is the figure of its task in words: its own metric by name, or the bits of each token
    that it predicts; empty where it has neither. `tokens` are None where samples are no token ids.
    """

    name: str
    parameters: int
    layers: int
    samples: int
    tokens: int | None
    task: str
    sites: tuple[SiteFigures, ...]


def model_figures(model: Model) -> ModelFigures:
    """Run the model on its samples and measure the inputs of its linear layers and scans."""
    sites = [
        site
        for site in model.sites()
        if (
            site.kind == "linear" and site.port == "input" and site.module not in (model.head or ())
        )
        or (site.kind == "scan" and site.port == "u")
    ]
    quantiles: dict[str, float] = {site.name: 0.0 for site in sites}
    maxima: dict[str, Tensor] = {}

    def collect(_index: int, site: Site, tensor: Tensor) -> None:
        magnitudes = tensor.detach().float().abs()
        channels = magnitudes.reshape(-1, magnitudes.shape[-1]).amax(0)
        quantiles[site.name] += float(quantile(magnitudes, 0.9995))
        if site.name in maxima:
            torch.maximum(maxima[site.name], channels, out=maxima[site.name])
        else:
            maxima[site.name] = channels

    is_predicting = model.metric is None and predicts_next_tokens(model)
    bits: list[float] = []
    outputs: list[Tensor] = []
    with torch.no_grad():
        for index, sample in enumerate(model.inputs):
            result = pass_through(model, sites, index, sample, collect)["logits"]
            if is_predicting:
                bits.append(float(next_token_loss(result, sample)) / math.log(2))
            elif model.metric is not None:
                outputs.append(result.float().cpu())
    task = f"{sum(bits) / len(bits):.4f} bits per token" if bits else ""
    if model.metric is not None:
        arguments = {"outputs": outputs, "reference": outputs, "inputs": model.inputs}
        figures = task_figures(model.metric, model.name, "fp32", arguments)
        task = f"{metric_name(model.metric)} {figures.figure:.6g}"
    ids = [of for of in map(token_ids, model.inputs) if of is not None]
    tokens = sum(of.numel() for of in ids) if len(ids) == len(model.inputs) else None
    return ModelFigures(
        model.name,
        sum(p.numel() for p in model.module.parameters()),
        len(model.layers),
        len(model.inputs),
        tokens,
        task,
        tuple(
            _figures(site.name, maxima[site.name], quantiles[site.name] / len(model.inputs))
            for site in sites
            if site.name in maxima
        ),
    )


def _figures(name: str, channels: Tensor, quantile_0_9995: float) -> SiteFigures:
    largest = float(channels.amax())
    middle = float(channels.median()) or 1.0
    return SiteFigures(
        name,
        largest,
        largest / quantile_0_9995 if quantile_0_9995 else math.inf,
        largest / middle,
        int((channels > OUTLIER * middle).count_nonzero()),
    )
