"""A record of activations on a terminal: the worst layers in 80 columns, and what was found."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from qgate.activation_stats.findings import findings, summary
from qgate.activation_stats.reading import common_start, nonfinite, worst_format
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.summaries.reading import figure_of
from qgate.text import brief, one_line, shortened

_WIDTH, _ROWS = 80, 12


def activation_text(record: ActivationsRecord) -> str:
    """Lines of at most 80 characters, the worst layers first."""
    parts = [
        _wrapped(f"{record['model']}: {summary(record)}"),
        _table(record),
        "\n".join(_wrapped(str(each), "        ") for each in findings(record)),
        "\n".join(keep_lines(record)),
        "\n".join(_wrapped(f"note    {each}", "        ") for each in record["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def worst_layers(record: ActivationsRecord) -> list[LayerActivations]:
    """Those that are not finite first, then by what the format that suits them least keeps."""

    def badness(each: LayerActivations) -> tuple[bool, float, float]:
        worst = worst_format(each)
        least = worst[1].worse if worst else math.inf
        return (not nonfinite(each), least, -_figure(each, "max_over_rms"))

    return sorted((e for e in record["layers"] if e["portrait"]["elements"]), key=badness)


def keep_lines(record: ActivationsRecord) -> list[str]:
    """Layers to keep in higher precision, as YAML: ready to be pasted."""
    lines: list[str] = []
    for each in record["proposals"]:
        if each["keep"]:
            why = "reaches" if each["reached"] else "does not reach"
            lines.append(one_line(f"# {each['format']}: {why} {each['target']}"))
            lines += [f"- {_yaml(name)}" for name in each["keep"]]
    return lines


def _yaml(name: str) -> str:
    plain = bool(name) and all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    quoted = "".join(f"\\{c}" if c in '"\\' else c for c in one_line(name))
    return name if plain and not name.startswith(("-", ".")) else f'"{quoted}"'


def _figure(layer: LayerActivations, name: str) -> float:
    told = figure_of(layer.get("outliers", {}), name)
    if math.isnan(told) and name == "max_over_rms":
        rms = figure_of(layer["portrait"], "rms")
        told = figure_of(layer["portrait"], "amax") / rms if rms > 0 else math.nan
    return told if math.isfinite(told) else -1.0


def max_over_rms(layer: LayerActivations) -> float:
    """NaN where there is no value."""
    told = _figure(layer, "max_over_rms")
    return told if told >= 0 else math.nan


def _table(record: ActivationsRecord) -> str:
    layers = worst_layers(record)
    told = [worst_format(each) for each in layers[:_ROWS]]
    rows = [["role", "amax", "max/rms", "tokens", "worst format, dB"]]
    for each, worst in zip(layers, told, strict=False):
        bad = f"{shortened(worst[0], 16)} {worst[1].short}".removesuffix(" dB") if worst else "-"
        rows.append(
            [
                each["role"],
                _brief(figure_of(each["portrait"], "amax")),
                _brief(max_over_rms(each)),
                _brief(figure_of(each.get("outliers", {}), "mean_count")),
                "NOT FINITE" if nonfinite(each) else bad,
            ]
        )
    if len(rows) == 1:
        return ""
    room = _WIDTH - sum(2 + max(map(len, column)) for column in zip(*rows, strict=True))
    start = common_start([each["module"] for each in layers[:_ROWS]])
    names = [f"{shortened(start, room - 1)}…" if start else "layer"]
    names += [shortened(each["module"][len(start) :] or "the model", room) for each in layers]
    more = len(layers) - _ROWS
    tail = [f"and {more} more layers and roles"] if more > 0 else []
    if any(worst and worst[1].differs for worst in told):
        tail.append("two figures: with/without massive elements")
    named = [[name, *row] for name, row in zip(names, rows, strict=False)]
    return "\n".join([*_columns(named, "<<>>><"), *tail])


def _brief(value: float) -> str:
    return brief(value) if math.isfinite(value) else "-"


def _columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{text:{side}{w}}" for text, side, w in zip(row, sides, widths, strict=True)
        ).rstrip()[:_WIDTH]
        for row in rows
    ]


def _wrapped(text: str, rest: str = "") -> str:
    return textwrap.fill(one_line(text), _WIDTH, subsequent_indent=rest, break_on_hyphens=False)
