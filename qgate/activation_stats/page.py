"""The page of an activation report: one file with its pictures inside, findings first.

Everything from the model, the data or the settings is escaped. Scripts only sort tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.activation_stats.findings import findings, summary
from qgate.activation_stats.reading import (
    Loss,
    format_names,
    loss_of,
    losses,
    name_of,
    of_role,
    systematic_channels,
    visible,
    with_losses,
    worst_format,
)
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.texts import keep_lines, max_over_rms, worst_layers
from qgate.charts.inline import STYLE
from qgate.charts.pages import Cell, headline, number, render
from qgate.summaries.reading import figure_of
from qgate.text import decibels, shortened
from qgate.text.findings import not_drawn

Rows = list[list[Cell]]
_MOST = 150
SECTIONS = {
    "outliers": ("Outliers", "Outlier tokens were not looked for, or none of it was asked for."),
    "formats": ("Formats", "No layer has figures of formats."),
    "sensitivity": ("Sensitivity", "Not asked for (sensitivity.enabled)."),
    "smoothing": ("Smoothing", "Not asked for (smoothing.enabled), or no layer is linear."),
    "magnitude": ("Magnitudes", "Not asked for (visualization.enabled.magnitude_…)."),
    "distribution": ("Distributions", "Not asked for (visualization.enabled.distribution)."),
    "percentiles": ("Percentiles", "Not asked for (visualization.enabled.percentile_range)."),
    "heatmap": ("Heat maps", "Not asked for (visualization.enabled.heatmap_3d)."),
}  # fmt: skip


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture on the page: its section, file, title, description, and the SVG with its width."""

    section: str
    path: str
    title: str
    about: str
    svg: str
    width: int


def page(
    record: ActivationsRecord,
    embedded: Sequence[EmbeddedPicture],
    files: Sequence[str],
    failed: Mapping[str, str],
) -> str:
    """Render the page; `files` are beside it, `failed` has the errors of missing pictures."""
    name = shortened(record["model"], 90)
    by_section: dict[str, list[EmbeddedPicture]] = {section: [] for section in SECTIONS}
    for picture in embedded:
        by_section[picture.section].append(picture)
    settings = [*record["settings"].items()]
    settings += [(f"version of {part}", value) for part, value in record["versions"].items()]
    settings += [(f"seconds of {part}", f"{s:.2f}") for part, s in record["seconds"].items()]
    names = format_names(record)
    sentences = [*not_drawn(failed), *findings(record)]
    first, tone = headline(sentences, name)
    tables = {
        "layers": _layer_rows(record, names),
        "channels": _channel_rows(record),
        "tokens": _token_rows(record),
        "formats": _format_rows(record, names),
        "sensitivity": _sensitivity_rows(record),
        "smoothing": _smoothing_rows(record),
    }
    tables_of = {"outliers": ("channels", "tokens")}
    sections = {
        name: words
        for name, words in SECTIONS.items()
        if by_section[name] or any(tables.get(of) for of in tables_of.get(name, (name,)))
    }
    return render(
        "activation_stats/page",
        title=f"Activations of {shortened(name, 60)}",
        first=first,
        tone=tone,
        name=name,
        summary=summary(record),
        findings=sentences,
        keep="\n".join(keep_lines(record)),
        links=[
            ("layers", "Worst layers", 0),
            *((name, words[0], len(by_section[name])) for name, words in sections.items()),
            ("settings", "Settings", 0),
            ("files", "Files", 0),
        ],
        sections=sections,
        absent=[words for name, words in SECTIONS.items() if name not in sections],
        pictures=by_section,
        sheet_style=STYLE,
        most=_MOST,
        format_names=names,
        tables=tables,
        settings=settings,
        files=files,
        notes=record["notes"],
    )


# Tables ------------------------------------------------------------------------------------------


def _db(value: float) -> Cell:
    return number(value, decibels(value))


def _loss(loss: Loss | None) -> Cell:
    return number(math.nan) if loss is None else number(loss.worse, loss.short)


def _worst(layer: LayerActivations) -> Cell:
    """Write the figure that sorts the layers."""
    name, loss = worst_format(layer) or ("", None)
    return _loss(None) if loss is None else number(loss.worse, f"{name} {loss.short}")


def _layer_rows(record: ActivationsRecord, names: Sequence[str]) -> Rows:
    return [
        [
            Cell(name_of(layer, 80)),
            Cell(layer["role"]),
            _worst(layer),
            *(number(figure_of(layer["portrait"], name)) for name in ("amax", "rms", "kurtosis")),
            number(max_over_rms(layer)),
            *(
                number(figure_of(layer.get("outliers", {}), name))
                for name in ("channel_ratio", "token_ratio", "mean_count")
            ),
            *(_loss(losses(layer).get(name)) for name in names),
        ]
        for layer in worst_layers(record)
    ]


def _channel_rows(record: ActivationsRecord) -> Rows:
    return [
        [Cell(kind), number(channel, str(channel)), number(layers, str(layers)), number(ratio)]
        for kind, channel, layers, ratio in systematic_channels(record["layers"])
    ]


def _token_rows(record: ActivationsRecord) -> Rows:
    kinds = (("tokens", "outlier token"), ("massive", "massive activation"))
    places = []
    for layer in record["layers"]:
        outliers: Mapping[str, Any] = layer.get("outliers", {})
        places += [(layer, word, token) for kind, word in kinds for token in outliers.get(kind, ())]
    rows = [
        [
            Cell(name_of(layer, 60)),
            Cell(layer["role"]),
            Cell(word),
            Cell(visible(token["text"]) if "text" in token else "–"),
            number(token["sample"], str(token["sample"])),
            number(token["position"], str(token["position"])),
            number(figure_of(token, "channel"), str(token.get("channel", "–"))),
            number(token["value"]),
            number(figure_of(token, "ratio")),
        ]
        for layer, word, token in places
    ]
    return sorted(rows, key=lambda row: -abs(float(row[7].key or 0)))


def _smoothing_rows(record: ActivationsRecord) -> Rows:
    rows = []
    for layer in record["layers"]:
        for advice in layer.get("smoothing", []):
            gain = advice["after_db"] - advice["before_db"]
            rows.append(
                [
                    Cell(name_of(layer, 70)),
                    Cell(advice["format"]),
                    number(advice["alpha"]),
                    _db(advice["before_db"]),
                    _db(advice["after_db"]),
                    number(gain, f"{gain:+.1f} dB"),
                    _db(figure_of(advice, "hadamard_db")),
                ]
            )
    return sorted(rows, key=lambda row: -float(row[5].key or 0))


def _sensitivity_rows(record: ActivationsRecord) -> Rows:
    return [
        [
            Cell(name_of(entry, 70)),
            Cell(entry["format"]),
            _loss(loss_of(entry, "sqnr_db")),
            _loss(loss_of(entry, "local_sqnr_db")),
            number(figure_of(entry, "loss_change")),
        ]
        for entry in record["sensitivity"]
    ]


def _format_rows(record: ActivationsRecord, names: Sequence[str]) -> Rows:
    rows = []
    for name in names:
        for role in ("input", "output", "weight"):
            pairs = with_losses(of_role(record, role), name)
            if pairs:
                loss, layer = pairs[0]
                ratios = [loss.sqnr_db, loss.rest_db, _middle(loss.sqnr_db for loss, _ in pairs)]
                ratios.append(_middle(loss.rest_db for loss, _ in pairs))
                words = (name, role, name_of(layer, 70))
                rows.append([*map(Cell, words), *map(_db, ratios)])
    return rows


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[len(ordered) // 2] if ordered else math.nan
