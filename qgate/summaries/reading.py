"""Reads the record of a dump's analysis for pictures, text and page."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qgate.errors import QgateError
from qgate.records import required_fields, validate
from qgate.summaries.record import (
    ANALYSIS,
    DumpAnalysis,
    FormatOutcome,
    PeerCell,
    TensorSummary,
    ValueSummary,
)
from qgate.text import decibels, distinct, one_line, shortened, shortened_title
from qgate.text.format_names import FORMAT_ALIASES

Floats = npt.NDArray[np.float64]
Kind = tuple[str, str, str]
Key = TypeVar("Key")
Item = TypeVar("Item")


def check_analysis(
    record: Any, place: str, hint: type, expected: str, *, what: str, subject: str
) -> None:
    """Refuse a record of another kind or version than expected, or a damaged one."""
    kind = record.get("kind") if isinstance(record, dict) else None
    family = expected.rstrip("0123456789")
    if isinstance(kind, str) and kind != expected and kind.startswith(family):
        raise QgateError(
            f"{place!r} was written by another version of qgate: it is a {kind!r}, and this one "
            f"reads {expected!r}. Use that version, or analyze the {subject} again."
        )
    if kind != expected:
        drawn = " `qgate dumps draw` draws it." if kind == ANALYSIS else ""
        raise QgateError(f"{place!r} is no {what}: its kind is {kind!r}, not {expected!r}.{drawn}")
    missing = sorted(set(required_fields(hint)) - record.keys())
    if missing:
        raise QgateError(f"{place!r} is damaged: it has no {', '.join(missing)}.")
    try:
        validate(record, hint)
    except ValueError as error:
        raise QgateError(f"{place!r} is damaged: {error}.") from None


def figure_of(record: Mapping[str, Any], name: str) -> float:
    """Return a number of a record; NaN where it is missing or not a number."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def figures_of(records: Iterable[Mapping[str, Any]], name: str) -> Floats:
    """Return the finite values of a number in all records."""
    figures = np.array([figure_of(record, name) for record in records], dtype=np.float64)
    return figures[np.isfinite(figures)]


FINE_DB = 80.0
"""An SQNR beyond which pictures make no difference."""


def two_ratios(whole: float, without_massive: float) -> str:
    """Write an SQNR, and the one without massive elements where it reads differently."""
    text, other = decibels(whole), decibels(without_massive)
    return text if text == other else f"{text} ({other} without massive elements)"


def none_stands_out(ranks: int) -> str:
    """Say that no rank stands out; two ranks are always equally far from each other."""
    if ranks < 3:
        return f"Three ranks are needed to say which stands out, here are {ranks}"
    return f"No rank of {ranks} stands out by the distribution of its finite values"


# Tensors and what they are -----------------------------------------------------------------------


def kind_of(tensor: Mapping[str, Any]) -> Kind:
    """Return the kind of a tensor, whose members are comparable: layer type, operation, name."""
    return str(tensor["layer_type"]), str(tensor["operation"]), str(tensor["name"])


def kind_title(kind: Sequence[str], most: int = 40) -> str:
    """Write a kind with words short enough for the last one, the name, to show."""
    whole = " ".join(one_line(word) for word in kind if word)
    if len(whole) <= most:
        return whole
    return " ".join(shortened(word, max(8, most // 3 - 1)) for word in kind if word)


def tensor_title(tensor: Mapping[str, Any], most: int = 120) -> str:
    return shortened_title(tensor.get("title") or "tensor without a name", most)


def row_titles(tensors: Sequence[Mapping[str, Any]], most: int = 60) -> list[str]:
    """Return titles of tensors that are all different, however short."""
    titles = [tensor_title(tensor, most) for tensor in tensors]
    alike = {title for title, count in Counter(titles).items() if count > 1}
    ends = [
        f", order {tensor['order']}" if title in alike and "order" in tensor else ""
        for title, tensor in zip(titles, tensors, strict=True)
    ]
    pairs = zip(tensors, ends, strict=True)
    return distinct([tensor_title(tensor, most - len(end)) + end for tensor, end in pairs])


def quant_type_of(tensor: Mapping[str, Any]) -> str:
    return str(tensor.get("quant_type") or "") or "no quant type"


def layer_of(tensor: Mapping[str, Any]) -> int | None:
    layer = tensor.get("layer")
    return layer if isinstance(layer, int) else None


def layers_named(layers: Iterable[int | None], most: int = 6) -> str:
    """Write `layer 2`, or `layers 0, 1 and 3, modules outside layers`."""
    distinct_layers = set(layers)
    layer_numbers = sorted(layer for layer in distinct_layers if layer is not None)
    names = [str(layer) for layer in layer_numbers[:most]]
    names += [f"{len(layer_numbers) - most} more"] if len(layer_numbers) > most else []
    text = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    phrases = [f"layer{'' if len(layer_numbers) == 1 else 's'} {text}"] if layer_numbers else []
    return ", ".join(phrases + ["modules outside layers"] * (None in distinct_layers))


def apart_by_member(cells: Iterable[PeerCell]) -> dict[int, list[PeerCell]]:
    """Return the layers that stand out by rank or sample, the farthest first."""
    outlying = sorted((c for c in cells if c["stands_out"]), key=lambda cell: -cell["ratio"])
    return grouped(outlying, lambda cell: cell["member"])


def layers_apart(cells: Sequence[PeerCell], member: int) -> str:
    """Write ` in layer 2` where a rank or sample stands out in some of its layers, not in all."""
    mine = [cell for cell in cells if cell["member"] == member]
    layers = {cell["layer"] for cell in mine if cell["stands_out"]}
    return f" in {layers_named(layers)}" if 0 < len(layers) < len(mine) else ""


def is_gradient(tensor: Mapping[str, Any]) -> bool:
    return tensor["operation"] == "backward" and str(tensor["name"]).startswith("grad")


def nonfinite(tensor: Mapping[str, Any]) -> int:
    return sum(int(tensor.get(name) or 0) for name in ("nan", "posinf", "neginf"))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key, in the order the keys came."""
    groups: defaultdict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def by_kind(items: Iterable[Item]) -> dict[Kind, list[Item]]:
    """Group items by kind: attention before linear, forward before backward, then by name."""
    groups = grouped(items, lambda item: kind_of(item))  # type: ignore[arg-type]
    order = {"forward": 0, "backward": 1}
    return dict(sorted(groups.items(), key=lambda i: (i[0][0], order.get(i[0][1], 2), i[0][2])))


def value_tensors(analysis: DumpAnalysis) -> list[TensorSummary]:
    """Return the tensors with at least one finite extreme."""
    return [t for t in analysis["tensors"] if math.isfinite(figure_of(t, "amax"))]


# Formats -----------------------------------------------------------------------------------------


def outcome_of(tensor: Mapping[str, Any], name: str) -> FormatOutcome | None:
    outcome = (tensor.get("formats") or {}).get(name)
    return outcome if isinstance(outcome, dict) else None  # type: ignore[return-value]


def format_outcomes(items: Iterable[Item], name: str) -> Iterator[tuple[Item, FormatOutcome]]:
    """Yield each item that has the outcome of a format, with it."""
    for item in items:
        outcome = outcome_of(item, name)  # type: ignore[arg-type]
        if outcome is not None:
            yield item, outcome


def format_names(analysis: DumpAnalysis) -> list[str]:
    """Return the formats that any tensor has outcomes of, those of the settings first."""
    in_tensors = dict.fromkeys(n for t in analysis["tensors"] for n in t.get("formats") or {})
    in_settings = [name for name in analysis["formats"] if name in in_tensors]
    return [*in_settings, *(name for name in in_tensors if name not in in_settings)]


def cast_names(analysis: DumpAnalysis) -> list[str]:
    """Return the formats that cast values as they are, without scales of their own."""
    scaled = {name for name, edges in analysis["formats"].items() if edges["scaled"]}
    return [name for name in format_names(analysis) if name not in scaled]


_AS_WIDE = frozenset(("bf16", "fp16", "float32", "float64"))
_FEW_PATTERNS, _MANY = 256, 4096


def is_quantized(tensor: Mapping[str, Any]) -> bool:
    """Tell if values are on a narrow grid already: a format has them exactly, or a large tensor has
    no more different values than 8 bits have."""
    for name, outcome in (tensor.get("formats") or {}).items():
        exact = max(ratios_db(outcome)) > FINE_DB
        if name not in _AS_WIDE and exact and figure_of(outcome, "signal") > 0:
            return True
    patterns = figure_of(tensor.get("usage") or {}, "patterns")
    return patterns <= _FEW_PATTERNS and figure_of(tensor, "counted") >= _MANY


def format_named(analysis: DumpAnalysis, label: str) -> str | None:
    """The format that a label such as `hifp8` means, if there are figures of it."""
    names = format_names(analysis)
    name = label if label in names else FORMAT_ALIASES.get(label, label)
    return name if name in names else None


def format_label(analysis: DumpAnalysis, name: str) -> str:
    """A format with the granularity of its scale, where that is no part of the format."""
    edges = analysis["formats"].get(name)
    granularity = edges.get("granularity") if edges else None
    return f"{name} per {granularity}" if granularity else name


def saturated(outcome: Mapping[str, Any]) -> float:
    return figure_of(outcome, "upper") + figure_of(outcome, "lower")


def flushed(outcome: Mapping[str, Any]) -> float:
    return figure_of(outcome, "flushed")


def ratio_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): infinite without noise, NaN without a signal."""
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal < 0 or noise < 0:
        return math.nan
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def saturation_cost(outcome: Mapping[str, Any]) -> float:
    """Return the share of saturated elements in the squared error; NaN where it is unknown."""
    return figure_of(outcome, "saturated_error_share")


def ratios_db(outcome: Mapping[str, Any]) -> tuple[float, float]:
    """Return the SQNR with all elements and without massive ones.

    It is that of the format's own scales; without any, that of the cast or of the power of two
    that loses least, whichever is better.
    """
    pairs = []
    for kind in ("", "fitted_"):
        whole = ratio_db(figure_of(outcome, f"{kind}signal"), figure_of(outcome, f"{kind}noise"))
        rest_noise = figure_of(outcome, f"{kind}rest_noise")
        without_massive = ratio_db(figure_of(outcome, "rest_signal"), rest_noise)
        if not math.isnan(whole):
            pairs.append((whole, whole if math.isnan(without_massive) else without_massive))
    return max(pairs, key=min, default=(math.nan, math.nan))


def worse_db(outcome: Mapping[str, Any]) -> float:
    """Return the worse of the SQNR with and without massive elements: one element can hide that
    all others are lost."""
    return min(ratios_db(outcome))


def worst(
    items: Iterable[Item], measure: Callable[[Item], float], count: int = 1
) -> list[tuple[Item, float]]:
    """Return the items of the largest finite measures, with their measures."""
    measured = ((item, measure(item)) for item in items)
    return heapq.nlargest(
        count, (pair for pair in measured if math.isfinite(pair[1])), key=lambda pair: pair[1]
    )


# Distributions -----------------------------------------------------------------------------------


def binades_of(items: Iterable[ValueSummary]) -> tuple[int, Floats] | None:
    """Add the counts of all items by power of two, without empty ends."""
    total: defaultdict[int, float] = defaultdict(float)
    for item in items:
        binades = item.get("binades")
        for offset, count in enumerate(binades["counts"] if binades else ()):
            if count > 0:
                total[binades["first"] + offset] += count  # type: ignore[index]
    if not total:
        return None
    first, last = min(total), max(total)
    return first, np.array([total.get(exponent, 0.0) for exponent in range(first, last + 1)])


def histogram_of(histogram: object) -> tuple[Floats, Floats] | None:
    """Return edges and density of a histogram; None if it is empty."""
    if not isinstance(histogram, dict) or not histogram.get("counts"):
        return None
    counts = np.asarray(histogram["counts"], dtype=np.float64)
    low, high = figure_of(histogram, "low"), figure_of(histogram, "high")
    if not (counts.sum() > 0 and math.isfinite(high - low) and high > low):
        return None
    edges = np.linspace(low, high, len(counts) + 1)
    widths = np.diff(edges)
    if not (widths > 0).all():
        return None
    return edges, counts / counts.sum() / widths


def outliers(tensor: Mapping[str, Any]) -> float:
    """Return the ratio of the largest channel to the median one; NaN without channels."""
    channels = tensor.get("channels")
    if not channels or not channels.get("largest") or not channels["median"] > 0:
        return math.nan
    largest = max(figure_of({"v": size}, "v") for _, size in channels["largest"])
    return largest / float(channels["median"])
