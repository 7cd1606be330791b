"""Reads the record of activations: what drawing, text and page all ask of it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from qgate.activation_stats.record import PER_TENSOR, ActivationsRecord, LayerActivations, Proposal
from qgate.summaries.reading import figure_of, ratio_db
from qgate.summaries.record import HIDDEN_DB
from qgate.text import decibels, one_line, shortened

BROKEN_DB = 10.0
"""An SQNR below which a format is said to break a layer: the error is a third of the signal."""

GAIN_DB = 1.0
"""What smoothing gains at least where a layer is named for it."""

EXACT_DB = 320.0
"""How a record has an SQNR without any error."""


@dataclass(frozen=True)
class Look:
    """The settings that say how a record is shown, by the names that they have there."""

    dpi: int = 200
    show_legend: bool = True
    reduce_dim: int | None = -1
    combined_plot: bool = False
    layer_wise: bool = True
    position: bool = True
    token: bool = True
    top_n: int = 10
    plot_types: tuple[str, ...] = ("boxplot", "histogram")
    distribution_input: bool = True
    histogram_layers: int = 4
    heat_input: bool = False
    view_angle: tuple[float, ...] = (30.0, 45.0)
    flat_layers: int = 2
    percentile_input: bool = True
    use_abs: bool = False
    style: str = "line"
    formats: tuple[str, ...] = ("png", "html", "csv", "json")
    report_name: str = "analysis_report"

    @property
    def reduced(self) -> str:
        """What the vectors that are drawn were reduced to."""
        return {-1: "token", -2: "channel"}.get(self.reduce_dim or 0, "all")

    @property
    def pictures(self) -> tuple[str, ...]:
        """Endings of the pictures that are written."""
        return tuple(name for name in self.formats if name in ("png", "svg", "pdf"))


_KEYS = {
    "dpi": "dpi",
    "show_legend": "show_legend",
    "reduce_dim": "magnitude.reduce_dim",
    "combined_plot": "magnitude.combined_plot",
    "layer_wise": "enabled.outlier_layer_wise",
    "position": "enabled.outlier_position",
    "token": "enabled.outlier_token",
    "top_n": "outlier.top_n",
    "plot_types": "distribution.plot_types",
    "distribution_input": "distribution.is_input",
    "histogram_layers": "distribution.num_layers_to_show",
    "heat_input": "heatmap_3d.is_input",
    "view_angle": "heatmap_3d.view_angle",
    "flat_layers": "heatmap_3d.num_2d_layers",
    "percentile_input": "percentile_range.is_input",
    "use_abs": "percentile_range.use_abs",
    "style": "percentile_range.style",
}
KEYS = {name: f"visualization.{key}" for name, key in _KEYS.items()}
KEYS |= {"formats": "output.formats", "report_name": "output.report_name"}


def look_of(settings: Mapping[str, Any]) -> Look:
    """How a run asked to be shown; `settings` are those of its record."""
    told: dict[str, Any] = {name: settings[key] for name, key in KEYS.items() if key in settings}
    many = {each.name for each in fields(Look) if "tuple" in str(each.type)}
    shown: dict[str, Any] = {k: tuple(v) if k in many else v for k, v in told.items()}
    return Look(**shown)


# Layers ------------------------------------------------------------------------------------------

Layers = list[LayerActivations]


def by_place(record: ActivationsRecord) -> dict[tuple[str, str], LayerActivations]:
    """Layers by module and role."""
    return {(each["module"], each["role"]): each for each in record["layers"]}


def in_panel(record: ActivationsRecord, kind: str, pattern: str, role: str) -> Layers:
    """The layers of a panel, in its order, that anything was seen of."""
    known = by_place(record)
    names = record["panels"].get(kind, {}).get(pattern, [])
    found = [known[name, role] for name in names if (name, role) in known]
    return [each for each in found if each["portrait"]["elements"]]


def of_role(record: ActivationsRecord, role: str) -> Layers:
    return [each for each in record["layers"] if each["role"] == role]


def outlier_layers(record: ActivationsRecord) -> Layers:
    """Where outlier tokens were searched for: the panel of the rule, in its order."""
    patterns = record["panels"].get("outliers", {})
    found = [each for p in patterns for each in in_panel(record, "outliers", p, "output")]
    return [each for each in found if "outliers" in each]


def kind_name(module: str) -> str:
    """The name of a module without its numbers: what is repeated in every block is one kind."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) or "the model"


def kinds(layers: Iterable[LayerActivations]) -> dict[str, Layers]:
    """Layers by the kind of their module, in the order they came."""
    found: dict[str, Layers] = {}
    for each in layers:
        found.setdefault(kind_name(each["module"]), []).append(each)
    return found


def short_kinds(names: Iterable[str]) -> dict[str, str]:
    """Kinds without what they all begin with up to a number, which tells none of them apart."""
    told = list(names)
    whole = {name for name in told if any(other.startswith(f"{name}.") for other in told)}
    starts = {n[: n.rfind("*.") + 2] if "*." in n else "" for n in told if n not in whole}
    start = starts.pop() if len(starts) == 1 else ""
    if not start or any(f"{name}." != start for name in whole):
        return {name: name for name in told}
    return {n: "whole block" if n in whole else n[len(start) :] for n in told}


def numbers(layers: Sequence[LayerActivations]) -> list[int] | None:
    """Their numbers, if each has one of its own."""
    told = [each["layer"] for each in layers]
    if len(set(told)) < len(told) or None in told:
        return None
    return [number for number in told if number is not None]


def name_of(layer: Mapping[str, Any], most: int = 48) -> str:
    return shortened(layer["module"] or "the model", most)


def common_start(names: Sequence[str]) -> str:
    """What all names begin with, up to a dot; nothing of a single one."""
    low, high = min(names, default=""), max(names, default="")
    size = next((k for k, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), 0)
    return low[: low.rfind(".", 0, size) + 1]


def amax(layer: LayerActivations) -> float:
    return figure_of(layer["portrait"], "amax")


def nonfinite(layer: LayerActivations) -> int:
    told = layer["portrait"]
    return told["nan"] + told["posinf"] + told["neginf"]


def leads(count: int, total: int) -> bool:
    """If a share of places is worth a headline: several are one, or there is no other."""
    return count > 1 or total == 1


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most <= 1:
        return list(items[:1])
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def rounding_note(layers: Iterable[LayerActivations]) -> str:
    """Return how far quantiles of rounded values are off; empty where none were rounded."""
    most = max((each.get("rounding", 0.0) for each in layers), default=0.0)
    return f"±{100 * most:.1g} %" if most else ""


# Formats -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What a format keeps of a tensor: its SQNR with and without massive elements, infinite where
    it is exact; without them NaN in a record that does not tell."""

    sqnr_db: float
    rest_db: float

    @property
    def worse(self) -> float:
        """The lower of the two."""
        return self.sqnr_db if math.isnan(self.rest_db) else min(self.sqnr_db, self.rest_db)

    @property
    def differs(self) -> bool:
        """If the two are different numbers where they are shown."""
        known = not math.isnan(self.rest_db)
        return known and decibels(self.rest_db) != decibels(self.sqnr_db)

    @property
    def flattered(self) -> bool:
        """If massive elements make the format look better than it is."""
        return self.sqnr_db - self.worse > HIDDEN_DB

    def __str__(self) -> str:
        if not self.differs:
            return decibels(self.sqnr_db)
        return f"{decibels(self.sqnr_db)}, {decibels(self.rest_db)} without massive elements"

    @property
    def short(self) -> str:
        """Both numbers, with/without massive elements."""
        both = decibels(self.sqnr_db).removesuffix(" dB") + "/" if self.differs else ""
        return f"{both}{decibels(self.rest_db if self.differs else self.sqnr_db)}"


def losses(layer: LayerActivations) -> dict[str, Loss]:
    """What each format keeps; a format that nothing is known of is absent."""
    told = {name: _loss(name, fate) for name, fate in layer["portrait"].get("formats", {}).items()}
    return {name: loss for name, loss in told.items() if not math.isnan(loss.sqnr_db)}


def _loss(name: str, fate: Mapping[str, Any]) -> Loss:
    """Return the loss of a cast; with one scale per tensor, of the power of two that loses least
    if that is better, by the worse of the two figures."""
    kinds = ("", "fitted_") if name.endswith(PER_TENSOR) else ("",)
    pairs = [
        Loss(
            ratio_db(figure_of(fate, f"{kind}signal"), figure_of(fate, f"{kind}noise")),
            ratio_db(figure_of(fate, "rest_signal"), figure_of(fate, f"{kind}rest_noise")),
        )
        for kind in kinds
    ]
    known = [loss for loss in pairs if not math.isnan(loss.sqnr_db)]
    return max(known, key=lambda loss: loss.worse, default=Loss(math.nan, math.nan))


def loss_of(record: Mapping[str, Any], name: str) -> Loss | None:
    """Read an SQNR of a record and that without massive elements."""
    told = Loss(figure_of(record, name), figure_of(record, f"{name}_without_massive"))
    return None if math.isnan(told.sqnr_db) else told


def worst_format(layer: LayerActivations) -> tuple[str, Loss] | None:
    """Return the format with the lowest SQNR of a layer, by the worse of its two figures."""
    told = losses(layer)
    return min(told.items(), key=lambda pair: pair[1].worse) if told else None


def format_names(record: ActivationsRecord) -> list[str]:
    return list(dict.fromkeys(name for each in record["layers"] for name in losses(each)))


def target_value(proposal: Proposal, value: float) -> str:
    """A value of a proposal, with the unit of its target."""
    if not proposal["target"].endswith("dB"):
        return f"{value:.4g}"
    return decibels(value if value < EXACT_DB else math.inf)


# Names of files ----------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Letters, digits and ._- alone, as users of regular expressions read them."""
    told = re.sub(r"\\([dwsDWS])\+?", r"\1", text).replace("\\", "").replace(".", "_")
    told = re.sub(r"[^A-Za-z0-9_-]+", "_", told)
    return re.sub(r"_{2,}", "_", told).strip("_-")[:60] or "all"


def digest(text: str, length: int = 6) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def stems(patterns: Iterable[str]) -> dict[str, str]:
    """A name for each pattern; those that clean to the same get a piece of their hash."""
    told = {pattern: clean(pattern) for pattern in patterns}
    same = [stem.lower() for stem in told.values()]
    return {
        pattern: stem if same.count(stem.lower()) == 1 else f"{stem}-{digest(pattern)}"
        for pattern, stem in told.items()
    }


def model_stem(model: str) -> str:
    """What files call a model: the last part of its path."""
    scheme, colon, rest = model.partition(":")
    path = rest if colon and scheme.lower() in ("hf", "mamba") else model
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    told = re.sub(r"[^A-Za-z0-9._-]+", "_", last).strip("._-")
    return told[:60] or "model"


def visible(text: str, most: int = 24) -> str:
    """A token as one reads it: spaces and line ends are seen, and nothing else is invisible."""
    told = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return shortened(one_line(told), most) or "(empty)"
