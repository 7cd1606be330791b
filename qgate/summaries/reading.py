"""Reads the record of a dump's analysis: what drawing, text and page all ask of it."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qgate.charts.palette import FORMAT_ALIASES
from qgate.summaries.record import DumpAnalysis, Fate, PeerCell, Portrait, TensorPortrait
from qgate.text import decibels, distinct, one_line, shortened, shortened_title

Floats = npt.NDArray[np.float64]
Kind = tuple[str, str, str]
Key = TypeVar("Key")
Item = TypeVar("Item")


def figure_of(record: Mapping[str, Any], name: str) -> float:
    """A number of a record; NaN where it is missing or is none."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def figures_of(records: Iterable[Mapping[str, Any]], name: str) -> Floats:
    """The finite ones of all records."""
    found = np.array([figure_of(record, name) for record in records], dtype=np.float64)
    return found[np.isfinite(found)]


FINE_DB = 80.0
"""Beyond it nobody asks how much: pictures show it as one place."""


def two_ratios(whole: float, rest: float) -> str:
    """An SQNR, and the one without massive elements where it reads otherwise."""
    told, other = decibels(whole), decibels(rest)
    return told if told == other else f"{told} ({other} without massive elements)"


def none_stands_out(ranks: int) -> str:
    """Of two, each is as far from the other."""
    if ranks < 3:
        return f"Three ranks are needed to say which stands out, here are {ranks}"
    return f"No rank of {ranks} stands out by the distribution of its finite values"


# Tensors and what they are -----------------------------------------------------------------------


def kind_of(tensor: Mapping[str, Any]) -> Kind:
    """What makes tensors of a network comparable: type of the layer, direction, name."""
    return str(tensor["layer_type"]), str(tensor["operation"]), str(tensor["name"])


def kind_title(kind: Sequence[str], most: int = 40) -> str:
    """Words that are short enough each, so that the last one, the name, always shows."""
    whole = " ".join(one_line(word) for word in kind if word)
    if len(whole) <= most:
        return whole
    return " ".join(shortened(word, max(8, most // 3 - 1)) for word in kind if word)


def tensor_title(tensor: Mapping[str, Any], most: int = 120) -> str:
    """Return the title of a tensor, at most so long."""
    return shortened_title(tensor.get("title") or "tensor without a name", most)


def row_titles(tensors: Sequence[Mapping[str, Any]], most: int = 60) -> list[str]:
    """Titles of tensors in one list, of which no two are the same however short they are."""
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
    """`layer 2`, `layers 0, 1 and 3`; what is in no block is outside layers."""
    found = set(layers)
    known = sorted(layer for layer in found if layer is not None)
    names = [str(layer) for layer in known[:most]]
    names += [f"{len(known) - most} more"] if len(known) > most else []
    text = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    told = [f"layer{'' if len(known) == 1 else 's'} {text}"] if known else []
    return ", ".join(told + ["modules outside layers"] * (None in found))


def apart_by_member(cells: Iterable[PeerCell]) -> dict[int, list[PeerCell]]:
    """Layers that stand out by rank or sample, the farthest first."""
    told = sorted((c for c in cells if c["stands_out"]), key=lambda cell: -cell["ratio"])
    return grouped(told, lambda cell: cell["member"])


def layers_apart(cells: Sequence[PeerCell], member: int) -> str:
    """` in layer 2`, where a rank or sample stands out in some of its layers and not in all."""
    mine = [cell for cell in cells if cell["member"] == member]
    layers = {cell["layer"] for cell in mine if cell["stands_out"]}
    return f" in {layers_named(layers)}" if 0 < len(layers) < len(mine) else ""


def is_gradient(tensor: Mapping[str, Any]) -> bool:
    return tensor["operation"] == "backward" and str(tensor["name"]).startswith("grad")


def nonfinite(tensor: Mapping[str, Any]) -> int:
    return sum(int(tensor.get(name) or 0) for name in ("nan", "posinf", "neginf"))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by a key, in the order the keys came."""
    found: defaultdict[Key, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


def by_kind(items: Iterable[Item]) -> dict[Kind, list[Item]]:
    """In the order attention before linear, forward before backward, then by name."""
    found = grouped(items, lambda item: kind_of(item))  # type: ignore[arg-type]
    order = {"forward": 0, "backward": 1}
    return dict(sorted(found.items(), key=lambda i: (i[0][0], order.get(i[0][1], 2), i[0][2])))


def value_tensors(analysis: DumpAnalysis) -> list[TensorPortrait]:
    """Those with at least one finite extreme."""
    return [t for t in analysis["tensors"] if math.isfinite(figure_of(t, "amax"))]


# Formats -----------------------------------------------------------------------------------------


def fate_of(tensor: Mapping[str, Any], name: str) -> Fate | None:
    found = (tensor.get("formats") or {}).get(name)
    return found if isinstance(found, dict) else None  # type: ignore[return-value]


def fates(items: Iterable[Item], name: str) -> Iterator[tuple[Item, Fate]]:
    """Each item that has figures of a format, with them."""
    for item in items:
        fate = fate_of(item, name)  # type: ignore[arg-type]
        if fate is not None:
            yield item, fate


def format_names(analysis: DumpAnalysis) -> list[str]:
    """Formats that any tensor has figures of, those of the settings first."""
    seen = {name: None for tensor in analysis["tensors"] for name in tensor.get("formats") or {}}
    known = [name for name in analysis["formats"] if name in seen]
    return [*known, *(name for name in seen if name not in known)]


def cast_names(analysis: DumpAnalysis) -> list[str]:
    """Those of them that cast values as they are: without scales of their own."""
    scaled = {name for name, edges in analysis["formats"].items() if edges["scaled"]}
    return [name for name in format_names(analysis) if name not in scaled]


_AS_WIDE = frozenset(("bf16", "fp16", "float32", "float64"))
_FEW_PATTERNS, _MANY = 256, 4096


def is_quantized(tensor: Mapping[str, Any]) -> bool:
    """Whether its values are on a narrow grid already: a format holds them exactly, or there are no
    more of them than 8 bits have although it is large."""
    for name, fate in (tensor.get("formats") or {}).items():
        exact = max(ratios_db(fate)) > FINE_DB
        if name not in _AS_WIDE and exact and figure_of(fate, "signal") > 0:
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


def saturated(fate: Mapping[str, Any]) -> float:
    return figure_of(fate, "upper") + figure_of(fate, "lower")


def flushed(fate: Mapping[str, Any]) -> float:
    return figure_of(fate, "flushed" if "flushed" in fate else "flush")


def ratio_db(signal: float, noise: float) -> float:
    """Infinite without noise; NaN where there is nothing to compare."""
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal < 0 or noise < 0:
        return math.nan
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def saturation_cost(fate: Mapping[str, Any]) -> float:
    """The part of the squared error that saturated elements have; NaN where it is not known."""
    return figure_of(fate, "saturated_error_share")


def ratios_db(fate: Mapping[str, Any]) -> tuple[float, float]:
    """SQNR with all elements and without massive ones, which are the same where there are none.

    With the format's own scales; where it has none, cast as it is or with the power of two
    that loses least, whichever is better.
    """
    found = []
    for kind in ("", "fitted_"):
        whole = ratio_db(figure_of(fate, f"{kind}signal"), figure_of(fate, f"{kind}noise"))
        rest = ratio_db(figure_of(fate, "rest_signal"), figure_of(fate, f"{kind}rest_noise"))
        if not math.isnan(whole):
            found.append((whole, whole if math.isnan(rest) else rest))
    return max(found, key=min, default=(math.nan, math.nan))


def sqnr_db(fate: Mapping[str, Any]) -> float:
    """The SQNR with all elements."""
    return ratios_db(fate)[0]


def worse_db(fate: Mapping[str, Any]) -> float:
    """The SQNR with all elements or that without massive ones, whichever is worse: one element can
    hide that all others are lost."""
    return min(ratios_db(fate))


def worst(
    items: Iterable[Item], measure: Callable[[Item], float], count: int = 1
) -> list[tuple[Item, float]]:
    """The items of the largest finite measures, with them."""
    told = ((item, measure(item)) for item in items)
    return heapq.nlargest(
        count, (pair for pair in told if math.isfinite(pair[1])), key=lambda pair: pair[1]
    )


# Distributions -----------------------------------------------------------------------------------


def binades_of(items: Iterable[Portrait]) -> tuple[int, Floats] | None:
    """Counts of all items by power of two, without empty ends."""
    total: defaultdict[int, float] = defaultdict(float)
    for item in items:
        told = item.get("binades")
        for place, count in enumerate(told["counts"] if told else ()):
            if count > 0:
                total[told["first"] + place] += count  # type: ignore[index]
    if not total:
        return None
    first, last = min(total), max(total)
    return first, np.array([total.get(exponent, 0.0) for exponent in range(first, last + 1)])


def histogram_of(told: object) -> tuple[Floats, Floats] | None:
    """Edges and density of a histogram with anything in it."""
    if not isinstance(told, dict) or not told.get("counts"):
        return None
    counts = np.asarray(told["counts"], dtype=np.float64)
    low, high = figure_of(told, "low"), figure_of(told, "high")
    if not (counts.sum() > 0 and math.isfinite(high - low) and high > low):
        return None
    edges = np.linspace(low, high, len(counts) + 1)
    widths = np.diff(edges)
    if not (widths > 0).all():
        return None
    return edges, counts / counts.sum() / widths


def outliers(tensor: Mapping[str, Any]) -> float:
    """The largest channel over the median one; NaN without channels."""
    told = tensor.get("channels")
    if not told or not told.get("largest") or not told["median"] > 0:
        return math.nan
    return max(figure_of({"v": size}, "v") for _, size in told["largest"]) / float(told["median"])
