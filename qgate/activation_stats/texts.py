"""A record of activations on a terminal: the worst layers in 80 columns, and the findings."""

from __future__ import annotations

import math
import textwrap

from qgate.activation_stats.findings import findings, summary
from qgate.activation_stats.reading import common_start, worst_format
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.summaries.reading import figure_of, nonfinite
from qgate.text import brief, one_line, shortened

_WIDTH, _ROWS = 80, 12


def activation_text(record: ActivationsRecord) -> str:
    """Write lines of at most 80 characters, the worst layers first."""
    parts = [
        _wrapped(f"{record['model']}: {summary(record)}"),
        _table(record),
        "\n".join(_wrapped(finding.line(), "        ") for finding in findings(record)),
        "\n".join(keep_lines(record)),
        "\n".join(_wrapped(f"note    {note}", "        ") for note in record["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def worst_layers(record: ActivationsRecord) -> list[LayerActivations]:
    """Sort layers that are not finite first, then by the SQNR of their worst format."""

    def severity(layer: LayerActivations) -> tuple[bool, float, float]:
        worst, ratio = worst_format(layer), max_over_rms(layer)
        least = worst[1].worse if worst else math.inf
        return not nonfinite(layer["portrait"]), least, 1.0 if math.isnan(ratio) else -ratio

    return sorted((e for e in record["layers"] if e["portrait"]["elements"]), key=severity)


def keep_lines(record: ActivationsRecord) -> list[str]:
    """Write the layers to keep in higher precision as YAML, ready to be pasted."""
    lines: list[str] = []
    for proposal in record["proposals"]:
        if proposal["keep"]:
            why = "reaches" if proposal["reached"] else "does not reach"
            lines.append(one_line(f"# {proposal['format']}: {why} {proposal['target']}"))
            lines += [f"- {_yaml(name)}" for name in proposal["keep"]]
    return lines


def _yaml(name: str) -> str:
    plain = bool(name) and all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    quoted = "".join(f"\\{c}" if c in '"\\' else c for c in one_line(name))
    return name if plain and not name.startswith(("-", ".")) else f'"{quoted}"'


def max_over_rms(layer: LayerActivations) -> float:
    """Return the largest magnitude over the root mean square; NaN where there is no value."""
    ratio = figure_of(layer.get("outliers", {}), "max_over_rms")
    if math.isnan(ratio):
        rms = figure_of(layer["portrait"], "rms")
        ratio = figure_of(layer["portrait"], "amax") / rms if rms > 0 else math.nan
    return ratio if math.isfinite(ratio) and ratio >= 0 else math.nan


def _table(record: ActivationsRecord) -> str:
    layers = worst_layers(record)
    more, layers = len(layers) - _ROWS, layers[:_ROWS]
    if not layers:
        return ""
    worst = [worst_format(layer) for layer in layers]
    rows = [["role", "amax", "max/rms", "tokens", "worst format, dB"]]
    for layer, pair in zip(layers, worst, strict=True):
        count = figure_of(layer.get("outliers", {}), "mean_count")
        figures = figure_of(layer["portrait"], "amax"), max_over_rms(layer), count
        bad = f"{shortened(pair[0], 16)} {pair[1].short}".removesuffix(" dB") if pair else "-"
        bad = "NOT FINITE" if nonfinite(layer["portrait"]) else bad
        numbers = [brief(value) if math.isfinite(value) else "-" for value in figures]
        rows.append([layer["role"], *numbers, bad])
    room = _WIDTH - sum(2 + max(map(len, column)) for column in zip(*rows, strict=True))
    start = common_start([layer["module"] for layer in layers])
    names = [f"{shortened(start, room - 1)}…" if start else "layer"]
    names += [shortened(layer["module"][len(start) :] or "the model", room) for layer in layers]
    named = [[name, *row] for name, row in zip(names, rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*named, strict=True)]
    lines = [
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(row, "<<>>><", widths, strict=True)
        ).rstrip()[:_WIDTH]
        for row in named
    ]
    if more > 0:
        lines.append(f"and {more} more layers and roles")
    if any(pair and pair[1].differs for pair in worst):
        lines.append("two figures: with/without massive elements")
    sampled = [pair[1].sampled for pair in worst if pair and pair[1].sampled]
    if sampled:
        lines.append(f"dB estimated from a sample that has every magnitude, {sampled[0]} at first")
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(one_line(text), _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
