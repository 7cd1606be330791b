"""The page of an activation report: one file with its pictures inside, findings first.

Everything that came from the model, the data or the settings is escaped, and all of it is there
without scripts: they only sort.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.activation_stats.findings import findings, summary, systematic
from qgate.activation_stats.reading import (
    Loss,
    format_names,
    loss_of,
    losses,
    name_of,
    visible,
    worst_format,
)
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.texts import keep_lines, max_over_rms, worst_layers
from qgate.charts.page_parts import (
    Cell,
    contents,
    document,
    empty,
    finding_list,
    number,
    section,
    sortable,
)
from qgate.charts.page_parts import figures as figure_grid
from qgate.summaries.reading import figure_of
from qgate.text import decibels, shortened
from qgate.text import for_html as text

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
_EXTRA = """
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 10px;
  overflow-x: auto; user-select: all; max-height: 26rem; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: 2px 16px; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.frame:focus-visible { outline: 3px solid var(--link); }
tbody th { min-width: 17rem; } td.text:nth-child(2) { min-width: 5rem; }
thead th { overflow-wrap: normal; } td.number { white-space: nowrap; }
@media (max-width: 600px) { .frame { overflow-x: auto; }
  .frame img { max-width: none; width: 760px; }
  tbody th { min-width: 9rem; } }
@media (max-width: 500px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; }
  figure { padding: 4px; } }
"""


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture that was drawn: in which section, its file, its sentence, and itself as a PNG."""

    section: str
    file: str
    title: str
    about: str
    data: bytes
    width: int
    height: int


def page(
    record: ActivationsRecord,
    shown: Sequence[EmbeddedPicture],
    files: Sequence[str],
    failed: Mapping[str, str],
) -> str:
    """The whole page; `files` lie beside it, `failed` says why pictures are missing."""
    name = shortened(record["model"], 90)
    parts = [
        f"<h1>Activations of <span class='name'>{text(name)}</span></h1>",
        f"<p class='about'>{text(summary(record))}</p>",
        _findings(record, failed),
        _keep(record),
        _contents(shown),
        _layers(record),
        *(_section(record, name, [s for s in shown if s.section == name]) for name in SECTIONS),
        _settings(record),
        _files(files),
        _notes(record),
    ]
    return document(f"Activations of {shortened(name, 60)}", parts, style=_EXTRA)


def _findings(record: ActivationsRecord, failed: Mapping[str, str]) -> str:
    rows = [("fail", f"{name} could not be drawn: {why}") for name, why in failed.items()]
    rows += [(each.level, each.text) for each in findings(record)]
    return f"<h2 id='findings'>Findings</h2>\n{finding_list(rows)}"


def _keep(record: ActivationsRecord) -> str:
    lines = "\n".join(keep_lines(record))
    if not lines:
        return ""
    return (
        "<h2 id='keep'>Layers to keep in higher precision</h2>\n"
        "<pre tabindex='0' role='region' aria-label='layers to keep'>"
        f"{text(lines, lines=True)}</pre>"
    )


def _contents(shown: Sequence[EmbeddedPicture]) -> str:
    links = [("layers", "Worst layers", 0)]
    links += [(n, title, sum(s.section == n for s in shown)) for n, (title, _) in SECTIONS.items()]
    return contents([*links, ("settings", "Settings", 0), ("files", "Files", 0)])


def _figure(picture: EmbeddedPicture) -> str:
    title = text(picture.title)
    data = base64.b64encode(picture.data).decode("ascii")
    return (
        f"<figure>\n<figcaption><b>{title}</b> <span>{text(picture.about)} · "
        f"{text(picture.file)}</span></figcaption>\n"
        f"<div class='frame' tabindex='0' role='group' aria-label='picture'>\n"
        f"<img src='data:image/png;base64,{data}' alt='{title}' width='{picture.width}' "
        f"height='{picture.height}' loading='lazy'>\n</div>\n</figure>"
    )


def _section(record: ActivationsRecord, name: str, shown: Sequence[EmbeddedPicture]) -> str:
    title, why = SECTIONS[name]
    table = _TABLES[name](record) if name in _TABLES else ""
    body = "\n".join(filter(None, [figure_grid([_figure(each) for each in shown]), table]))
    return section(name, title, body or empty(why))


# Tables ------------------------------------------------------------------------------------------


def _word(told: object) -> Cell:
    return str(told), None


def _db(value: float) -> Cell:
    return number(value, decibels(value))


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]], words: int, of: str) -> str:
    """The first `words` columns are texts, the others numbers; of many rows the first."""
    told = list(rows)
    if not told:
        return ""
    more = len(told) - _MOST
    rest = f"<p class='about'>{more:,} more in {text(of)}.csv.</p>" if more > 0 else ""
    return f"{sortable(head, told[:_MOST], words, of)}\n{rest}"


def _layers(record: ActivationsRecord) -> str:
    names = format_names(record)
    rows = []
    for each in worst_layers(record):
        told, found = losses(each), each.get("outliers", {})
        row = [_word(name_of(each, 80)), _word(each["role"]), _worst(each)]
        row += [number(figure_of(each["portrait"], name)) for name in ("amax", "rms", "kurtosis")]
        row.append(number(max_over_rms(each)))
        row += [number(figure_of(found, n)) for n in ("channel_ratio", "token_ratio", "mean_count")]
        row += [_loss(told.get(name)) for name in names]
        rows.append(row)
    head = ["layer", "role", "worst format", "amax", "rms", "kurtosis", "max/rms", "channel ratio",
            "token ratio", "outlier tokens", *names]  # fmt: skip
    table = _table(head, rows, 2, "layers")
    about = (
        "Worst first, by the lowest SQNR of any format (of two figures, with/without massive "
        "elements, the worse counts). Channel ratio: the largest channel "
        "over the median one; token ratio: the largest token over the median one; outlier tokens: "
        "per sample."
    )
    return section("layers", "Worst layers", f"<p class='about'>{about}</p>\n{table}")


def _loss(loss: Loss | None) -> Cell:
    return number(math.nan) if loss is None else number(loss.worse, loss.short)


def _worst(layer: LayerActivations) -> Cell:
    """What the order of the layers is by."""
    worst = worst_format(layer)
    if worst is None:
        return number(math.nan)
    name, loss = worst
    return number(loss.worse, f"{name} {loss.short}")


def _channels(record: ActivationsRecord) -> str:
    rows = [
        [_word(kind), number(channel, str(channel)), number(layers, str(layers)), number(ratio)]
        for kind, channel, layers, ratio in systematic(record)
    ]
    head = ["modules", "systematic channel", "layers", "largest over the median channel"]
    table = _table(head, rows, 1, "channels")
    return f"{table}{_tokens(record)}"


def _tokens(record: ActivationsRecord) -> str:
    rows = []
    for each in record["layers"]:
        found: Mapping[str, Any] = each.get("outliers", {"tokens": [], "massive": []})
        for kind in ("tokens", "massive"):
            for place in found[kind]:
                rows.append(
                    [
                        _word(name_of(each, 60)),
                        _word(each["role"]),
                        _word("outlier token" if kind == "tokens" else "massive activation"),
                        _word(visible(place["text"]) if "text" in place else "–"),
                        number(place["sample"], str(place["sample"])),
                        number(place["position"], str(place["position"])),
                        number(figure_of(place, "channel"), str(place.get("channel", "–"))),
                        number(place["value"]),
                        number(figure_of(place, "ratio")),
                    ]
                )
    rows.sort(key=lambda row: -abs(float(row[7][1] or 0)))
    head = [
        "layer",
        "role",
        "what",
        "token",
        "sample",
        "position",
        "channel",
        "value",
        "over median",
    ]
    table = _table(head, rows, 4, "tokens")
    return f"<h3>Where they are</h3>\n{table}" if table else ""


def _smoothing(record: ActivationsRecord) -> str:
    rows = [
        [
            _word(name_of(each, 70)),
            _word(one["format"]),
            number(one["alpha"]),
            _db(one["before_db"]),
            _db(one["after_db"]),
            number(
                one["after_db"] - one["before_db"], f"{one['after_db'] - one['before_db']:+.1f} dB"
            ),
            _db(figure_of(one, "hadamard_db")),
        ]
        for each in record["layers"]
        for one in each.get("smoothing", [])
    ]
    rows.sort(key=lambda row: -float(row[5][1] or 0))
    head = ["layer", "format", "best α", "as it is", "smoothed", "gain", "Hadamard rotation"]
    return _table(head, rows, 2, "smoothing")


def _sensitivity(record: ActivationsRecord) -> str:
    rows = [
        [
            _word(name_of(each, 70)),
            _word(each["format"]),
            _loss(loss_of(each, "sqnr_db")),
            _loss(loss_of(each, "local_sqnr_db")),
            number(figure_of(each, "loss_change")),
        ]
        for each in record["sensitivity"]
    ]
    head = ["layer quantized alone", "format", "SQNR of the model", "SQNR of the layer", "loss"]
    about = "<p class='about'>Of two figures: with/without massive elements.</p>\n" if rows else ""
    return about + _table(head, rows, 2, "sensitivity")


def _formats(record: ActivationsRecord) -> str:
    rows = []
    for name in format_names(record):
        for role in ("input", "output", "weight"):
            told = [(losses(e)[name], e) for e in record["layers"]
                    if e["role"] == role and name in losses(e)]  # fmt: skip
            if told:
                loss, bad = min(told, key=lambda pair: pair[0].worse)
                numbers = [loss.sqnr_db, loss.rest_db]
                numbers += [_middle(each.sqnr_db for each, _ in told)]
                numbers += [_middle(each.rest_db for each, _ in told)]
                words = (name, role, name_of(bad, 70))
                rows.append([*map(_word, words), *map(_db, numbers)])
    head = ["format", "role", "worst layer", "worst SQNR", "without massive elements",
            "median SQNR", "median without them"]  # fmt: skip
    about = (
        "A name that ends in “per tensor” has one scale for all values of a layer: modes of that "
        "format have one per token and output channel. Massive elements are beyond 20 times the "
        "root mean square of all but the largest 1 in 32."
    )
    table = _table(head, rows, 3, "formats")
    return f"<p class='about'>{about}</p>\n{table}" if table else ""


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[len(ordered) // 2] if ordered else math.nan


_TABLES: dict[str, Any] = {
    "outliers": _channels,
    "formats": _formats,
    "smoothing": _smoothing,
    "sensitivity": _sensitivity,
}


def _settings(record: ActivationsRecord) -> str:
    rows = [*record["settings"].items()]
    rows += [(f"version of {name}", value) for name, value in record["versions"].items()]
    rows += [(f"seconds of {name}", f"{value:.2f}") for name, value in record["seconds"].items()]
    items = "\n".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in rows)
    about = "<p class='about'>Those that differ from the defaults.</p>"
    return section("settings", "Settings", f"{about}\n<dl>\n{items}\n</dl>")


def _files(files: Sequence[str]) -> str:
    items = "\n".join(f"<li><a href='{text(name)}'>{text(name)}</a></li>" for name in files)
    return section("files", "Files", f"<ul>\n{items}\n</ul>") if items else ""


def _notes(record: ActivationsRecord) -> str:
    items = "\n".join(f"<li>{text(note)}</li>" for note in record["notes"])
    return section("notes", "Notes", f"<ul>\n{items}\n</ul>") if items else ""
