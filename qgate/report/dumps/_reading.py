"""Reads the record of a dump's analysis: what drawing, text and page all ask of it."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qgate.report._numbers import brief as brief
from qgate.results.portraits import DumpAnalysis, Fate, Portrait, TensorPortrait
from qgate.text import one_line

Floats = npt.NDArray[np.float64]
Kind = tuple[str, str, str]
Key = TypeVar("Key")
Item = TypeVar("Item")
_SPELLED = {"hifp8": "hif8", "mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4_e2m1", "bfloat16": "bf16"}


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


def shortened(text: object, most: int = 40) -> str:
    """A name that fits, its middle left out: its start and its end tell it apart."""
    clean = one_line(text)
    head = (most - 1) // 2
    return clean if len(clean) <= most else f"{clean[:head]}…{clean[head + 1 - most :]}"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """A share in percent; one that is not zero never reads as zero, nor one below 1 as all."""
    value = 100 * share
    if not math.isfinite(value):
        return "-"
    if value == 0 or value == 100:
        return f"{value:.0f} %"
    if value < 0.01:
        return f"{brief(float(f'{value:.1g}'))} %"
    return ">99.9 %" if value > 99.9 else f"{value:.2g} %" if value < 10 else f"{value:.1f} %"


FINE_DB = 80.0
"""Beyond it nobody asks how much: pictures show it as one place."""


def decibels(ratio_db: float) -> str:
    return "exact" if ratio_db == math.inf else f"{ratio_db:.1f} dB"


def none_stands_out(ranks: int) -> str:
    """Of two, each is as far from the other."""
    if ranks < 3:
        return f"Three ranks are needed to say which stands out, here are {ranks}"
    return f"No rank of {ranks} stands out"


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


def tensor_title(tensor: Mapping[str, Any], most: int = 60) -> str:
    return shortened(tensor.get("title") or "tensor without a name", most)


def tensor_place(tensor: Mapping[str, Any], most: int = 60) -> str:
    """What tells tensors of one title apart: the module, or the place in the order."""
    return shortened(tensor.get("module") or f"order {tensor.get('order', 'unknown')}", most)


def quant_type_of(tensor: Mapping[str, Any]) -> str:
    return str(tensor.get("quant_type") or "") or "no quant type"


def layer_of(tensor: Mapping[str, Any]) -> int | None:
    layer = tensor.get("layer")
    return layer if isinstance(layer, int) else None


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


def format_named(analysis: DumpAnalysis, label: str) -> str | None:
    """The format that a label such as `hifp8` means, if there are figures of it."""
    names = format_names(analysis)
    name = label if label in names else _SPELLED.get(label, label)
    return name if name in names else None


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


def sqnr_db(fate: Mapping[str, Any]) -> float:
    """With the format's own scales; where it has none, cast as it is or with the power of two
    that loses least, whichever is better."""
    told = (
        ratio_db(figure_of(fate, f"{kind}signal"), figure_of(fate, f"{kind}noise"))
        for kind in ("", "fitted_")
    )
    return max((ratio for ratio in told if not math.isnan(ratio)), default=math.nan)


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
