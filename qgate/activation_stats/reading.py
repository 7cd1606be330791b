"""Reads the record of activations for pictures, text, tables and page."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.activation_stats.record import (
    EXACT_DB,
    PER_TENSOR,
    ActivationsRecord,
    LayerActivations,
    Proposal,
    Smoothed,
)
from qgate.summaries.reading import Item, figure_of, grouped, ratio_db
from qgate.summaries.record import HIDDEN_DB
from qgate.text import decibels, one_line, shortened

BROKEN_DB = 10.0
"""An SQNR below which a format breaks a layer: the error is a third of the signal."""

GAIN_DB = 1.0
"""The least gain of smoothing for which a layer is named."""


# Layers ------------------------------------------------------------------------------------------

Layers = list[LayerActivations]


def in_panel(record: ActivationsRecord, kind: str, pattern: str, role: str) -> Layers:
    """Return the layers of a panel that have values, in its order."""
    by_key = {(layer["module"], layer["role"]): layer for layer in record["layers"]}
    names = record["panels"].get(kind, {}).get(pattern, [])
    layers = [by_key[name, role] for name in names if (name, role) in by_key]
    return [layer for layer in layers if layer["portrait"]["elements"]]


def of_role(record: ActivationsRecord, role: str) -> Layers:
    return [layer for layer in record["layers"] if layer["role"] == role]


def outlier_layers(record: ActivationsRecord) -> Layers:
    """Return the layers that were searched for outlier tokens, in the order of their panel."""
    patterns = record["panels"].get("outliers", {})
    layers = [layer for p in patterns for layer in in_panel(record, "outliers", p, "output")]
    return [layer for layer in layers if "outliers" in layer]


def kind_name(module: str) -> str:
    """Return the name of a module without its numbers: what each block repeats is one kind."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) or "the model"


def kinds(layers: Iterable[LayerActivations]) -> dict[str, Layers]:
    """Group layers by the kind of their module, in the order they came."""
    return grouped(layers, lambda each: kind_name(each["module"]))


def short_kinds(names: Iterable[str]) -> dict[str, str]:
    """Cut the common beginning of kinds, up to a number."""
    names = list(names)
    whole = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    starts = {n[: n.rfind("*.") + 2] if "*." in n else "" for n in names if n not in whole}
    start = starts.pop() if len(starts) == 1 else ""
    if not start or any(f"{name}." != start for name in whole):
        return {name: name for name in names}
    return {n: "whole block" if n in whole else n[len(start) :] for n in names}


def numbers(layers: Sequence[LayerActivations]) -> list[int] | None:
    """Return the numbers of layers, if each has one of its own."""
    layer_numbers = [layer["layer"] for layer in layers if layer["layer"] is not None]
    return layer_numbers if len(set(layer_numbers)) == len(layers) else None


def name_of(layer: Mapping[str, Any], most: int = 48) -> str:
    return shortened(layer["module"] or "the model", most)


def common_start(names: Sequence[str]) -> str:
    """Return the common beginning of names up to a dot; a single name has none."""
    low, high = min(names, default=""), max(names, default="")
    size = next((k for k, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), 0)
    return low[: low.rfind(".", 0, size) + 1]


def amax(layer: LayerActivations) -> float:
    return figure_of(layer["portrait"], "amax")


def worth_naming(count: int, total: int) -> bool:
    """Tell if the most frequent value is worth a headline: it is repeated, or the only one."""
    return count > 1 or total == 1


def spread_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Choose at most so many, with the first and the last."""
    if len(items) <= most or most <= 1:
        return list(items[:most])
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def rounding_note(layers: Iterable[LayerActivations]) -> str:
    """Return the error of quantiles of rounded values; empty where none were rounded."""
    most = max((layer.get("rounding", 0.0) for layer in layers), default=0.0)
    return f"±{100 * most:.1g} %" if most else ""


def systematic_channels(layers: Iterable[LayerActivations]) -> list[tuple[str, int, int, float]]:
    """List systematic channels: kind of module and role, channel, number of layers, and the largest
    ratio to the median channel; those of most layers first."""
    ratios: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for layer in layers:
        for channel in layer["outliers"]["channels"] if "outliers" in layer else ():
            if channel["systematic"]:
                kind = f"{kind_name(layer['module'])} {layer['role']}"
                ratios[kind, channel["channel"]].append(channel["ratio"])
    rows = [(kind, channel, len(sizes), max(sizes)) for (kind, channel), sizes in ratios.items()]
    return sorted(rows, key=lambda row: (-row[2], -row[3], row[0], row[1]))


# Formats -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """The SQNR of a format with and without massive elements, infinite where it is exact; the
    second is NaN in a record that lacks it. `sampled` are the tokens that it is estimated from."""

    sqnr_db: float
    rest_db: float
    sampled: str = ""

    @property
    def worse(self) -> float:
        """The lower of the two."""
        return self.sqnr_db if math.isnan(self.rest_db) else min(self.sqnr_db, self.rest_db)

    @property
    def differs(self) -> bool:
        """True if the two read differently."""
        has_rest = not math.isnan(self.rest_db)
        return has_rest and decibels(self.rest_db) != decibels(self.sqnr_db)

    @property
    def flattered(self) -> bool:
        """True if massive elements make the format look better than it is."""
        return self.sqnr_db - self.worse > HIDDEN_DB

    def __str__(self) -> str:
        reduced = f", {decibels(self.rest_db)} without massive elements" if self.differs else ""
        return decibels(self.sqnr_db) + reduced + (f" ({self.sampled})" if self.sampled else "")

    @property
    def short(self) -> str:
        """Both numbers, with/without massive elements."""
        first = decibels(self.sqnr_db).removesuffix(" dB") + "/" if self.differs else ""
        return f"{first}{decibels(self.rest_db if self.differs else self.sqnr_db)}"


def losses(layer: LayerActivations) -> dict[str, Loss]:
    """Return the loss of each format that has figures."""
    outcomes = layer["portrait"].get("formats", {})
    by_format = {name: _loss(name, outcome, layer) for name, outcome in outcomes.items()}
    return {name: loss for name, loss in by_format.items() if not math.isnan(loss.sqnr_db)}


def with_losses(
    layers: Iterable[LayerActivations], name: str
) -> list[tuple[Loss, LayerActivations]]:
    """Return the layers that have a loss of a format, with it, the worst first."""
    pairs = [(losses(layer).get(name), layer) for layer in layers]
    return sorted(
        ((loss, layer) for loss, layer in pairs if loss is not None), key=lambda pair: pair[0].worse
    )


def _loss(name: str, outcome: Mapping[str, Any], layer: LayerActivations) -> Loss:
    """Return the loss of a cast, or of the best power of two as scale per tensor if it is better
    by the worse of its two figures."""
    kinds = ("", "fitted_") if name.endswith(PER_TENSOR) else ("",)
    pairs = [
        Loss(
            ratio_db(figure_of(outcome, f"{kind}signal"), figure_of(outcome, f"{kind}noise")),
            ratio_db(figure_of(outcome, "rest_signal"), figure_of(outcome, f"{kind}rest_noise")),
            _sampled(outcome, layer),
        )
        for kind in kinds
    ]
    finite = [loss for loss in pairs if not math.isnan(loss.sqnr_db)]
    return max(finite, key=lambda loss: loss.worse, default=Loss(math.nan, math.nan))


def _sampled(outcome: Mapping[str, Any], layer: LayerActivations) -> str:
    """Write `of 16 of 4,000 tokens` where the errors of some stand for all."""
    measured, width = figure_of(outcome, "of"), max(layer["width"], 1)
    if not 0 < measured < layer["portrait"]["elements"]:
        return ""
    noun = "rows" if layer["role"] == "weight" else "tokens"
    return f"of {round(measured / width):,} of {layer['tokens']:,} {noun}"


def loss_of(record: Mapping[str, Any], name: str) -> Loss | None:
    """Read an SQNR of a record and that without massive elements."""
    loss = Loss(figure_of(record, name), figure_of(record, f"{name}_without_massive"))
    return None if math.isnan(loss.sqnr_db) else loss


def worst_format(layer: LayerActivations) -> tuple[str, Loss] | None:
    """Return the format with the lowest SQNR of a layer, by the worse of its two figures."""
    return min(losses(layer).items(), key=lambda pair: pair[1].worse, default=None)


def smoothed_by_format(
    record: ActivationsRecord,
) -> dict[str, list[tuple[LayerActivations, Smoothed]]]:
    """Return smoothing advice by format, with the layers that it is for."""
    pairs = ((layer, advice) for layer in record["layers"] for advice in layer.get("smoothing", []))
    return grouped(pairs, lambda pair: pair[1]["format"])


def format_names(record: ActivationsRecord) -> list[str]:
    return list(dict.fromkeys(name for layer in record["layers"] for name in losses(layer)))


def target_value(proposal: Proposal, value: float) -> str:
    """Write a value of a proposal, with the unit of its target."""
    if not proposal["target"].endswith("dB"):
        return f"{value:.4g}"
    return decibels(value if value < EXACT_DB else math.inf)


# Names of files ----------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Write a regular expression as part of a file name: letters, digits and _- alone."""
    name = re.sub(r"\\([dwsDWS])\+?", r"\1", text).replace("\\", "").replace(".", "_")
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", name)
    return re.sub(r"_{2,}", "_", name).strip("_-")[:60] or "all"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:6]


def stems(patterns: Iterable[str]) -> dict[str, str]:
    """Name each pattern, with a piece of its hash where two would get the same name."""
    cleaned = {pattern: clean(pattern) for pattern in patterns}
    same = [stem.lower() for stem in cleaned.values()]
    return {
        pattern: stem if same.count(stem.lower()) == 1 else f"{stem}-{digest(pattern)}"
        for pattern, stem in cleaned.items()
    }


def model_stem(model: str) -> str:
    """Return the name of a model in file names: the last part of its path."""
    scheme, colon, location = model.partition(":")
    path = location if colon and scheme.lower() in ("hf", "mamba") else model
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", last).strip("._-")[:60] or "model"


def visible(text: str) -> str:
    """Write a token with signs for spaces and line ends."""
    signs = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
    return shortened(one_line(text.translate(signs)), 24) or "(empty)"
