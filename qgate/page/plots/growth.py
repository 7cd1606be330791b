"""Plot of the error over the depth of a model by mode: carried, and local to each layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from qgate.charts import svg
from qgate.charts.lines import (
    DASH,
    ColoredLines,
    Line,
    color_lines,
    gray_key,
    line_chart,
    position_axis,
    thin_ticks,
)
from qgate.charts.svg import brief, cut_to_width, document, text_width, times
from qgate.page.runs import Growth

HEIGHT, BOTTOM = 250.0, 212.0
# A layer that multiplies the carried error by this much is named.
JUMP = 5.0
MOST_LAYERS, MOST_MODES = 400, 60


def error_growth(lines: Sequence[Growth], *, width: float = svg.WIDTH) -> str:
    """Draw relative MSE over the layers of one model, carried solid and local dashed.

    Of many modes only the carried error is drawn: the local ones would hide it.
    """
    layers, rows = align_layers(lines)
    chosen = color_lines(rows)
    colored = list(chosen.colored)
    if chosen.gray:
        colored = [replace(line, beside=()) for line in colored]
    chosen = ColoredLines(colored, chosen.gray[: MOST_MODES - len(colored)])
    x = position_axis(len(layers), colored, width)
    texts, order, name = layer_names(layers, abs(x.place(1) - x.place(0)))
    x = replace(x, ticks=thin_ticks(texts, x, order), label=name)
    y = svg.logarithmic(chosen.values, BOTTOM, svg.TOP, "relative MSE")
    entries = [(svg.stroke_sample("ink"), "carried")]
    if any(value is not None for line in colored for value in line.beside):
        entries.append((svg.stroke_sample("ink", DASH), "local"))
    entries += gray_key(len(rows) - len(colored), "modes")
    nothing = "" if layers else "no layers"
    body = line_chart(chosen, x, y, entries, width=width, nothing=nothing)
    last_values = [(line.name, _last(line)) for line in rows[:8]]
    ends = [f"{name} {'unknown' if v is None else brief(v)}" for name, v in last_values]
    description = (
        f"{len(rows)} mode{'s' * (len(rows) != 1)} over {len(layers)} layers; at the last: "
    )
    return document(width, HEIGHT, growth_finding(lines), f"{description}{', '.join(ends)}.", body)


def align_layers(lines: Sequence[Growth]) -> tuple[list[str], list[Line]]:
    """Return the layers of all modes in one order, and one line per mode, largest error first.

    A layer with several outputs stands as often as the mode that has most of it has it.
    """
    keyed = [_keys(line.layers[:MOST_LAYERS]) for line in lines]
    order: list[tuple[str, int]] = []
    for keys in sorted(keyed, key=len, reverse=True):
        at = 0
        positions = {key: position for position, key in enumerate(order)}
        for key in keys:
            if key in positions:
                at = order.index(key) + 1
            else:
                order.insert(at, key)
                at += 1
    rows = []
    for line, keys in zip(lines, keyed, strict=True):
        position = {key: at for at, key in enumerate(keys)}
        carried, local = (
            tuple(row[position[key]] if key in position else None for key in order)
            for row in (line.carried, line.local)
        )
        rows.append(Line(line.mode, carried, local))
    ranked = sorted(rows, key=lambda row: (-(_last(row) or 0.0), row.name))
    return [layer for layer, _ in order], ranked


def _keys(layers: Sequence[str]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    keys = []
    for layer in layers:
        keys.append((layer, counts[layer]))
        counts[layer] += 1
    return keys


def _last(line: Line) -> float | None:
    return next((value for value in reversed(line.values) if value is not None), None)


def layer_names(layers: Sequence[str], pitch: float) -> tuple[list[str], list[int], str]:
    """Return short texts of layers, the order in which to write them, and the axis label.

    Most layers differ by a number; it alone is written, and what is around it names the axis. A
    model of several lists, such as an encoder and a decoder, has the names of all of them there.
    """
    parts = [re.fullmatch(r"(.*?)(\d{1,5})(\D*)", layer[:200], re.DOTALL) for layer in layers]
    counts = Counter((part[1], part[3]) for part in parts if part)
    lists = [around for around, count in counts.items() if count > 1]
    texts, numbers = [], []
    for layer, part in zip(layers, parts, strict=True):
        numbered = part is not None and (part[1], part[3]) in lists
        texts.append(part[2] if part and numbered else cut_to_width(layer, 72))
        numbers.append(int(part[2]) if part and numbered else None)
    last = len(layers) - 1
    order = [0, last] if numbers and numbers[0] is None else [last, 0]
    wide = (
        max((text_width(str(number)) for number in numbers if number is not None), default=0.0) + 7
    )
    step = next((number for number in (1, 2, 5, 10, 20, 50) if number * pitch >= wide), 100)
    order += [at for at, number in enumerate(numbers) if number is not None and not number % step]
    order += () if lists else range(len(layers))
    name = _name_of_lists(lists) if lists else "layer"
    return texts, [at for at in dict.fromkeys(order) if 0 <= at <= last], name


def _name_of_lists(lists: Sequence[tuple[str, str]]) -> str:
    """Name the lists of a model, first to last, without what the names of several begin with."""
    names = [f"{before}N{behind}" for before, behind in lists]
    if len(names) == 1:
        return cut_to_width(names[0], 150)
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 2 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    width = max(60, 360 // len(names))
    return ", ".join(cut_to_width(".".join(parts[shared:]), width) for parts in split[:6])


def growth_finding(lines: Sequence[Growth]) -> str:
    layers, rows = align_layers(lines)
    last_values = [(line, _last(line)) for line in rows]
    ends = [(line, value) for line, value in last_values if value is not None]
    if not ends:
        return "No carried errors are known"
    if all(value in (0, None) for line in rows for value in line.values):
        return "No error at any layer"
    worst, most = ends[0]
    name = cut_to_width(worst.name, 130, 13)
    if len(ends) == 1:
        return _finding_of_one(name, worst, layers)
    least, fewest = ends[-1]
    other = cut_to_width(least.name, 130, 13)
    if fewest <= 0:
        return f"{name} ends at {brief(most)}, {other} is exact"
    if most < 1.1 * fewest:
        return f"All {len(ends)} modes end alike, at {brief(most)}"
    return f"{name} ends at {brief(most)}, {times(most / fewest)} as much as {other}"


def _finding_of_one(name: str, line: Line, layers: Sequence[str]) -> str:
    last, at = _last(line) or 0.0, 0
    best = 0.0
    for position in range(1, len(layers)):
        now, before = line.values[position], line.values[position - 1]
        if now and before and now / before > best:
            best, at = now / before, position
    if best >= JUMP:
        layer = cut_to_width(layers[at], 110, 13)
        return f"{name} ends at {brief(last)}; {layer} alone multiplies the error by {brief(best)}"
    measured = sum(value is not None for value in line.values)
    if measured < 3:
        return f"{name} ends at {brief(last)} after {measured} layer{'s' * (measured > 1)}"
    return f"{name} ends at {brief(last)}; no layer alone stands out"
