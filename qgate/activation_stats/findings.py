"""Findings of a record of activations, as sentences: broken values first, then lost accuracy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from qgate.activation_stats.reading import (
    BROKEN_DB,
    GAIN_DB,
    Layers,
    format_names,
    name_of,
    of_role,
    outlier_layers,
    smoothed_by_format,
    systematic_channels,
    target_value,
    visible,
    with_losses,
    worth_naming,
)
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.summaries.reading import figure_of, flushed, nonfinite, worst
from qgate.text import brief, counted, decibels, percent
from qgate.text.findings import Finding, Level, worst_first

Sentences = Iterator[tuple[Level, str]]
_MOST = 5


def findings(record: ActivationsRecord) -> list[Finding]:
    """List the findings, the worst first."""
    return worst_first(Finding(*pair) for detect in _DETECTORS for pair in detect(record))


def summary(record: ActivationsRecord) -> str:
    """Describe the run in a line: architecture, device, modules, samples."""
    data = record["data"]
    # The data of a record may have values of any kind.
    samples, tokens = (n if type(n) is int else 0 for n in map(data.get, ("samples", "tokens")))
    source = str(data.get("source"))
    if "sample" not in source:
        source += f"; {counted(samples, 'sample')}"
        source += f", {tokens:,} tokens" if data.get("tokens") else ""
    modules = counted(len({layer["module"] for layer in record["layers"]}), "module")
    return f"{record['architecture']} on {record['device']}, {modules}; {source}"


def _names(layers: Layers) -> str:
    names = ", ".join(f"{name_of(layer)} ({layer['role']})" for layer in layers[:_MOST])
    return names + (f" and {len(layers) - _MOST} more" if len(layers) > _MOST else "")


def _nonfinite(record: ActivationsRecord) -> Sentences:
    bad = [layer for layer in record["layers"] if nonfinite(layer["portrait"])]
    if bad:
        total = sum(nonfinite(layer["portrait"]) for layer in bad)
        yield "fail", f"{counted(total, 'value')} NaN or infinite, first in {_names(bad)}"


def _unreached(record: ActivationsRecord) -> Sentences:
    silent = [layer for layer in record["layers"] if not layer["calls"]]
    unreached = [layer for layer in silent if layer["role"] != "weight"]
    if unreached:
        yield "fail", f"no sample reached {_names(unreached)}: nothing is known of them"


def _flattered(record: ActivationsRecord) -> Sentences:
    """Name layers whose SQNR describes massive elements and not all others."""
    for name in format_names(record):
        hit = [pair for pair in with_losses(record["layers"], name) if pair[0].flattered]
        if not hit:
            continue
        loss, layer = hit[0]
        massive = "them"
        if "massive" in layer:
            many = counted(layer["massive"]["elements"], "element")
            massive = f"its {many} beyond {brief(layer['massive']['beyond'])}"
        text = f"{name} looks better than it is, because of massive elements, in "
        text += f"{_names([entry for _, entry in hit])}: "
        text += f"the {layer['role']} of {name_of(layer)} has {decibels(loss.sqnr_db)}, and "
        text += f"{decibels(loss.rest_db)} without {massive}"
        zeroed = flushed(layer["portrait"]["formats"][name])
        if zeroed > 0.5:
            text += f"; {percent(zeroed)} of its values become zero"
        yield ("warn" if loss.worse < BROKEN_DB else "info"), text


def _formats(record: ActivationsRecord) -> Sentences:
    """Name the worst layer of each format, among inputs or, without any, outputs."""
    role = "input" if of_role(record, "input") else "output"
    for name in format_names(record):
        pairs = with_losses(of_role(record, role), name)
        if not pairs:
            continue
        loss, bad = pairs[0]
        broken = sum(1 for loss, _ in pairs if loss.worse < BROKEN_DB)
        if broken:
            text = f"{name} breaks {counted(broken, role)} of {len(pairs)} (SQNR, or that without "
            text += f"massive elements, below {BROKEN_DB:g} dB), worst {name_of(bad)}: {loss}"
            yield "warn", text
        else:
            yield "info", f"{name}: worst {role} {name_of(bad)}, {loss}"


def _proposals(record: ActivationsRecord) -> Sentences:
    for proposal in record["proposals"]:
        name, target = proposal["format"], proposal["target"]
        layers = counted(len(proposal["keep"]), "layer")
        total = sum(1 for one in record["sensitivity"] if one["format"] == name)
        value = target_value(proposal, proposal["value"])
        none = target_value(proposal, proposal["all_quantized"])
        if not proposal["reached"]:
            text = f"{target} is not reached, not even with {layers} of {total} kept ({value})"
        elif not proposal["keep"]:
            text = f"all {total} layers quantized reach {target} ({value})"
        else:
            text = f"keep {layers} of {total} to reach {target} ({value}, none kept {none})"
        yield ("info" if proposal["reached"] else "warn"), f"{name}: {text}"


def _channels(record: ActivationsRecord) -> Sentences:
    rows = systematic_channels(record["layers"])
    if rows:
        # Of an input first: there it can be taken away.
        kind, channel, layers, ratio = max(
            rows, key=lambda row: (row[0].endswith(" input"), row[3])
        )
        away = ": smoothing or a rotation takes it away" if kind.endswith(" input") else ""
        more = f"; {len(rows) - 1} more of that kind in the tables" if len(rows) > 1 else ""
        text = f"channel {channel} of {kind} stands out throughout in {counted(layers, 'layer')}, "
        yield "warn", f"{text}up to {brief(ratio)} times the median channel{away}{more}"


def _tokens(record: ActivationsRecord) -> Sentences:
    layers = outlier_layers(record)
    if not layers:
        return
    limit = layers[0]["outliers"]["threshold"]
    hit = [layer for layer in layers if sum(layer["outliers"]["counts"])]
    undefined = sum(layer["outliers"]["undefined"] for layer in layers)
    if undefined:
        text = f"the outlier rule is undefined {undefined} times: the median token is all zero"
        yield "warn", text
    if not hit:
        near = worst(layers, lambda layer: figure_of(layer["outliers"], "token_ratio"))
        about = f"; the nearest, in {name_of(near[0][0])}, has {brief(near[0][1])}" if near else ""
        yield "info", f"no token is above {limit:g} times the median token{about}"
        return
    places: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for layer in hit:
        places.update({f" at position {p}": n for p, n in layer["outliers"]["positions"].items()})
        texts.update(layer["outliers"].get("texts", {}))
    total = sum(sum(layer["outliers"]["counts"]) for layer in hit)
    text = f"{counted(total, 'outlier token')} (above {limit:g} times the median) in {len(hit)} of "
    text += counted(len(layers), "layer")
    for counts in (places, texts):
        name, count = counts.most_common(1)[0] if counts else ("", 0)
        if counts and worth_naming(count, counts.total()):
            about = name if counts is places else f" “{visible(name)}”"
            text += f", {percent(count / counts.total())}{about}"
    yield "warn", text


def _massive(record: ActivationsRecord) -> Sentences:
    spots = [
        (abs(element["value"]), entry, element)
        for entry in record["layers"]
        for element in (entry["outliers"]["massive"] if "outliers" in entry else ())
    ]
    if not spots:
        return
    size, layer, element = max(spots, key=lambda row: row[0])
    where = f"sample {element['sample']}, position {element['position']}"
    where += f", channel {element['channel']}" if "channel" in element else ""
    where += f", “{visible(element['text'])}”" if "text" in element else ""
    many = counted(len({(entry["module"], entry["role"]) for _, entry, _ in spots}), "layer")
    text = f"massive single activations in {many}, the largest {brief(size)} in {name_of(layer)} "
    yield "warn", f"{text}({layer['role']}; {where})"


def _smoothing(record: ActivationsRecord) -> Sentences:
    for name, advice in smoothed_by_format(record).items():
        layer, one = max(advice, key=lambda pair: pair[1]["after_db"] - pair[1]["before_db"])
        gain = one["after_db"] - one["before_db"]
        if gain < GAIN_DB:
            yield "info", f"{name}: smoothing gains at most {gain:.1f} dB"
            continue
        text = f"{name}: smoothing gains up to {gain:.1f} dB "
        text += f"({name_of(layer)} at α {one['alpha']:g})"
        rotated = worst(
            advice, lambda pair: figure_of(pair[1], "hadamard_db") - pair[1]["before_db"]
        )
        if rotated and rotated[0][1] > 0:
            (layer, _), most = rotated[0]
            text += f", a Hadamard rotation up to {most:.1f} dB ({name_of(layer)})"
        yield "info", text


def _tails(record: ActivationsRecord) -> Sentences:
    def kurtosis(layer: LayerActivations) -> float:
        return figure_of(layer["portrait"], "kurtosis")

    layers = [entry for entry in record["layers"] if entry["role"] != "weight"]
    heaviest = worst(layers, kurtosis)
    measured = sum(math.isfinite(kurtosis(layer)) for layer in layers)
    if heaviest and heaviest[0][1] > 0 and measured > 1:
        layer, value = heaviest[0]
        text = f"heaviest tails: {name_of(layer)} ({layer['role']}), kurtosis {brief(value)}"
        yield "info", text


_DETECTORS = (
    _nonfinite, _unreached, _flattered, _formats, _proposals,
    _channels, _tokens, _massive, _smoothing, _tails,
)  # fmt: skip
