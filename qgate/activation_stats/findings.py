"""What a record of activations says, as sentences: what is broken first, then what is lost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qgate.activation_stats.reading import (
    BROKEN_DB,
    GAIN_DB,
    format_names,
    kind_name,
    leads,
    losses,
    name_of,
    nonfinite,
    of_role,
    outlier_layers,
    target_value,
    visible,
)
from qgate.activation_stats.record import ActivationsRecord, LayerActivations, Proposal
from qgate.summaries.reading import figure_of, flushed, worst
from qgate.text import brief, counted, decibels, percent

Level = Literal["fail", "warn", "info"]
_MARKS = {"fail": "BROKEN", "warn": "LOSS  ", "info": "note  "}
_SHOWN = 5


@dataclass(frozen=True)
class ActivationFinding:
    """One sentence; `fail` breaks a run, `warn` costs accuracy, `info` is good to know."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{_MARKS[self.level]}  {self.text}"


def findings(record: ActivationsRecord) -> list[ActivationFinding]:
    """All of them, the broken ones first."""
    told = [
        *_nonfinite(record),
        *_unseen(record),
        *_flattered(record),
        *_formats(record),
        *_proposals(record),
        *_channels(record),
        *_tokens(record),
        *_massive(record),
        *_smoothing(record),
        *_tails(record),
    ]
    return sorted(told, key=lambda each: ("fail", "warn", "info").index(each.level))


def summary(record: ActivationsRecord) -> str:
    """What was looked at, in a line."""
    data = record["data"]
    modules = len({each["module"] for each in record["layers"]})
    source = str(data.get("source"))
    if "sample" not in source:
        source += f"; {counted(_whole(data.get('samples')), 'sample')}"
        source += f", {_whole(data['tokens']):,} tokens" if data.get("tokens") else ""
    where = f"{record['architecture']} on {record['device']}"
    return f"{where}, {counted(modules, 'module')}; {source}"


def _nonfinite(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    bad = [each for each in record["layers"] if nonfinite(each)]
    if bad:
        total = sum(map(nonfinite, bad))
        first = ", ".join(f"{name_of(e)} ({e['role']})" for e in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        yield ActivationFinding(
            "fail", f"{counted(total, 'value')} NaN or infinite, first in {first}{more}"
        )


def _unseen(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    unseen = [each for each in record["layers"] if not each["calls"] and each["role"] != "weight"]
    if unseen:
        names = ", ".join(f"{name_of(e)} ({e['role']})" for e in unseen[:_SHOWN])
        more = f" and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else ""
        yield ActivationFinding(
            "fail", f"no sample reached {names}{more}: nothing is known of them"
        )


def _formats(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    """What breaks which format, of what is quantized: inputs, or outputs where there are none."""
    role = "input" if of_role(record, "input") else "output"
    layers = of_role(record, role)
    for name in format_names(record):
        told = [(losses(each)[name], each) for each in layers if name in losses(each)]
        if not told:
            continue
        loss, bad = min(told, key=lambda pair: pair[0].worse)
        broken = sum(1 for each, _ in told if each.worse < BROKEN_DB)
        if broken:
            text = f"{name} breaks {counted(broken, role)} of {len(told)} (SQNR, or that without "
            text += f"massive elements, below {BROKEN_DB:g} dB), worst {name_of(bad)}: {loss}"
            yield ActivationFinding("warn", text)
        else:
            yield ActivationFinding("info", f"{name}: worst {role} {name_of(bad)}, {loss}")


def _flattered(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    """Layers whose SQNR tells of massive elements and not of all others."""
    for name in format_names(record):
        told = [(losses(each)[name], each) for each in record["layers"] if name in losses(each)]
        hit = sorted((pair for pair in told if pair[0].flattered), key=lambda pair: pair[0].worse)
        if not hit:
            continue
        loss, layer = hit[0]
        text = f"{name} looks better than it is, because of massive elements, in {_named(hit)}: "
        text += f"the {layer['role']} of {name_of(layer)} has {decibels(loss.sqnr_db)}, and "
        text += f"{decibels(loss.rest_db)} without {_those(layer)}"
        zeroed = flushed(layer["portrait"]["formats"][name])
        if zeroed > 0.5:
            text += f"; {percent(zeroed)} of its values become zero"
        yield ActivationFinding("warn" if loss.worse < BROKEN_DB else "info", text)


def _named(hit: Sequence[tuple[Any, LayerActivations]]) -> str:
    names = ", ".join(f"{name_of(each)} ({each['role']})" for _, each in hit[:_SHOWN])
    return names + (f" and {len(hit) - _SHOWN} more" if len(hit) > _SHOWN else "")


def _those(layer: LayerActivations) -> str:
    if "massive" not in layer:
        return "them"
    found = layer["massive"]
    return f"its {counted(found['elements'], 'element')} beyond {brief(found['beyond'])}"


def _proposals(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    for each in record["proposals"]:
        total = sum(1 for one in record["sensitivity"] if one["format"] == each["format"])
        yield ActivationFinding(*_proposal(each, total))


def _proposal(each: Proposal, total: int) -> tuple[Level, str]:
    kept, name, target = len(each["keep"]), each["format"], each["target"]
    value, none = target_value(each, each["value"]), target_value(each, each["all_quantized"])
    if not each["reached"]:
        return "warn", (
            f"{name}: {target} is not reached, not even with {counted(kept, 'layer')} of {total} "
            f"kept ({value})"
        )
    if not kept:
        return "info", f"{name}: all {total} layers quantized reach {target} ({value})"
    return "info", (
        f"{name}: keep {counted(kept, 'layer')} of {total} to reach {target} "
        f"({value}, none kept {none})"
    )


def systematic(record: ActivationsRecord) -> list[tuple[str, int, int, float]]:
    """Channels that stand out throughout: kind of module and role, channel, layers, how far."""
    count: Counter[tuple[str, int]] = Counter()
    most: defaultdict[tuple[str, int], float] = defaultdict(float)
    for each in record["layers"]:
        for channel in each["outliers"]["channels"] if "outliers" in each else ():
            if channel["systematic"]:
                where = (f"{kind_name(each['module'])} {each['role']}", channel["channel"])
                count[where] += 1
                most[where] = max(most[where], channel["ratio"])
    told = [(kind, channel, n, most[kind, channel]) for (kind, channel), n in count.items()]
    return sorted(told, key=lambda row: (-row[2], -row[3], row[0], row[1]))


def _channels(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    told = systematic(record)
    if told:
        # Of an input first: there it can be taken away.
        kind, channel, layers, ratio = max(
            told, key=lambda row: (row[0].endswith(" input"), row[3])
        )
        away = ": smoothing or a rotation takes it away" if kind.endswith(" input") else ""
        more = f"; {len(told) - 1} more of that kind in the tables" if len(told) > 1 else ""
        yield ActivationFinding(
            "warn",
            f"channel {channel} of {kind} stands out throughout in {counted(layers, 'layer')}, up "
            f"to {brief(ratio)} times the median channel{away}{more}",
        )


def _tokens(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    layers = outlier_layers(record)
    if not layers:
        return
    limit = layers[0]["outliers"]["threshold"]
    hit = [each for each in layers if sum(each["outliers"]["counts"])]
    undefined = sum(each["outliers"]["undefined"] for each in layers)
    if undefined:
        yield ActivationFinding(
            "warn", f"the outlier rule is undefined {undefined} times: the median token is all zero"
        )
    if not hit:
        near = worst(layers, lambda each: figure_of(each["outliers"], "token_ratio"))
        about = f"; the nearest, in {name_of(near[0][0])}, has {brief(near[0][1])}" if near else ""
        yield ActivationFinding(
            "info", f"no token is above {limit:g} times the median token{about}"
        )
        return
    places: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for each in hit:
        places.update(each["outliers"]["positions"])
        texts.update(each["outliers"].get("texts", {}))
    total = sum(sum(each["outliers"]["counts"]) for each in hit)
    text = f"{counted(total, 'outlier token')} (above {limit:g} times the median) in {len(hit)} of "
    text += counted(len(layers), "layer")
    if places:
        where, count = places.most_common(1)[0]
        if leads(count, sum(places.values())):
            text += f", {percent(count / sum(places.values()))} at position {where}"
    if texts:
        what, count = texts.most_common(1)[0]
        if leads(count, sum(texts.values())):
            text += f", {percent(count / sum(texts.values()))} “{visible(what)}”"
    yield ActivationFinding("warn", text)


def _massive(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    told = [
        (abs(place["value"]), each, place)
        for each in record["layers"]
        for place in (each["outliers"]["massive"] if "outliers" in each else ())
    ]
    if not told:
        return
    size, layer, place = max(told, key=lambda row: row[0])
    where = f"sample {place['sample']}, position {place['position']}"
    where += f", channel {place['channel']}" if "channel" in place else ""
    where += f", “{visible(place['text'])}”" if "text" in place else ""
    many = len({(each["module"], each["role"]) for _, each, _ in told})
    yield ActivationFinding(
        "warn",
        f"massive single activations in {counted(many, 'layer')}, the largest {brief(size)} in "
        f"{name_of(layer)} ({layer['role']}; {where})",
    )


def _smoothing(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    found: defaultdict[str, list[tuple[LayerActivations, Any]]] = defaultdict(list)
    for each in record["layers"]:
        for one in each.get("smoothing", []):
            found[one["format"]].append((each, one))
    for name, told in found.items():
        layer, one = max(told, key=lambda pair: pair[1]["after_db"] - pair[1]["before_db"])
        gain = one["after_db"] - one["before_db"]
        if gain < GAIN_DB:
            yield ActivationFinding("info", f"{name}: smoothing gains at most {gain:.1f} dB")
            continue
        text = (
            f"{name}: smoothing gains up to {gain:.1f} dB ({name_of(layer)} at α {one['alpha']:g})"
        )
        turned = [p for p in told if "hadamard_db" in p[1]]
        if turned:
            best = max(turned, key=lambda p: p[1]["hadamard_db"] - p[1]["before_db"])
            most = best[1]["hadamard_db"] - best[1]["before_db"]
            text += (
                f", a Hadamard rotation up to {most:.1f} dB ({name_of(best[0])})"
                if most > 0
                else ""
            )
        yield ActivationFinding("info", text)


def _tails(record: ActivationsRecord) -> Iterator[ActivationFinding]:
    layers = [each for each in record["layers"] if each["role"] != "weight"]
    found = worst(layers, lambda each: figure_of(each["portrait"], "kurtosis"))
    several = sum(math.isfinite(figure_of(each["portrait"], "kurtosis")) for each in layers) > 1
    if several and found[0][1] > 0:
        layer, value = found[0]
        yield ActivationFinding(
            "info", f"heaviest tails: {name_of(layer)} ({layer['role']}), kurtosis {brief(value)}"
        )


def _whole(value: object) -> int:
    """What the record says of its data may be of any kind."""
    return value if type(value) is int else 0
