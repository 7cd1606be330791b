"""The page of an activation report: one file with its pictures inside, findings first.

Everything from the model, the data or the settings is escaped. Scripts only sort tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from qgate.charts.pages import Cell, headline, number
from qgate.charts.reports import PagePicture, Section, SectionTable, report_page
from qgate.summaries.reading import figure_of
from qgate.text import decibels, shortened
from qgate.text.findings import not_drawn

Rows = list[list[Cell]]
_LAYER_HEAD = ("layer", "role", "worst format", "amax", "rms", "kurtosis", "max/rms",
               "channel ratio", "token ratio", "outlier tokens")  # fmt: skip
_CHANNEL_HEAD = ("modules", "systematic channel", "layers", "largest over the median channel")
_TOKEN_HEAD = ("layer", "role", "what", "token", "sample", "position", "channel", "value",
               "over median")  # fmt: skip
_FORMAT_HEAD = ("format", "role", "worst layer", "worst SQNR", "without massive elements",
                "median SQNR", "median without them")  # fmt: skip
_ALONE_HEAD = ("layer quantized alone", "format", "SQNR of the model", "SQNR of the layer", "loss")
_SMOOTHING_HEAD = ("layer", "format", "best α", "as it is", "smoothed", "gain",
                   "Hadamard rotation")  # fmt: skip
_WORST_FIRST = (
    "Worst first, by the lowest SQNR of any format (of two figures, with/without massive elements, "
    "the worse counts). Channel ratio: the largest channel over the median one; token ratio: the "
    "largest token over the median one; outlier tokens: per sample."
)
_ABOUT = {
    "formats": "A name that ends in “per tensor” has one scale for all values of a layer: modes of "
    "that format have one per token and output channel. Massive elements are beyond 20 times the "
    "root mean square of all but the largest 1 in 32.",
    "sensitivity": "Of two figures: with/without massive elements.",
}
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


def page(
    record: ActivationsRecord,
    pictures: Mapping[str, Sequence[PagePicture]],
    files: Sequence[str],
    failed: Mapping[str, str],
) -> str:
    """Render the page with the pictures of its sections; `files` are beside it, `failed` has the
    errors of missing pictures."""
    name = shortened(record["model"], 90)
    sentences = [*not_drawn(failed), *findings(record)]
    first, tone = headline(sentences, name)
    return report_page(
        list(_sections(record, pictures)),
        verdict=first, tone=tone, findings=sentences, files=files, notes=record["notes"],
        title=f"Activations of {shortened(name, 60)}",
        about=f"Activations of {name}: {summary(record)}",
    )  # fmt: skip


def _sections(
    record: ActivationsRecord, pictures: Mapping[str, Sequence[PagePicture]]
) -> Iterator[Section]:
    names = format_names(record)
    yield Section(
        anchor="keep", title="Layers to keep in higher precision", lines=keep_lines(record),
        empty="No layer has to be kept in higher precision, or none was tried.",
    )  # fmt: skip
    yield Section(
        anchor="layers", title="Worst layers", about=_WORST_FIRST,
        tables=[_table("layers", [*_LAYER_HEAD, *names], 2, _layer_rows(record, names))],
    )  # fmt: skip
    tables = {
        "outliers": [
            _table("channels", _CHANNEL_HEAD, 1, _channel_rows(record)),
            _table("tokens", _TOKEN_HEAD, 4, _token_rows(record), "Where they are"),
        ],
        "formats": [_table("formats", _FORMAT_HEAD, 3, _format_rows(record, names))],
        "sensitivity": [_table("sensitivity", _ALONE_HEAD, 2, _sensitivity_rows(record))],
        "smoothing": [_table("smoothing", _SMOOTHING_HEAD, 2, _smoothing_rows(record))],
    }
    for anchor, (title, why) in SECTIONS.items():
        own = pictures.get(anchor, ())
        yield Section(
            anchor=anchor, title=title, total=len(own), about=_ABOUT.get(anchor, ""), pictures=own,
            tables=[table for table in tables.get(anchor, ()) if table.rows], empty=why,
        )  # fmt: skip
    settings: list[tuple[str, object]] = [*record["settings"].items()]
    settings += [(f"version of {part}", value) for part, value in record["versions"].items()]
    settings += [(f"seconds of {part}", f"{s:.2f}") for part, s in record["seconds"].items()]
    about = "Those that differ from the defaults."
    yield Section(anchor="settings", title="Settings", about=about, facts=settings)


# Tables ------------------------------------------------------------------------------------------


def _table(name: str, head: Sequence[str], words: int, rows: Rows, title: str = "") -> SectionTable:
    """Return the first rows of a table; a file beside the page has all of them."""
    more = f"{len(rows) - _MOST:,} more in {name}.csv." * (len(rows) > _MOST)
    return SectionTable(
        head=head, rows=rows[:_MOST], words=words, label=name, title=title, more=more
    )


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
