"""Pictures of a comparison as inline SVG: where scales lie, and the worst blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qgate.charts import axes
from qgate.charts.axes import BOTTOM, LEFT, RIGHT, TOP
from qgate.charts.lines import Line, color_lines, line_chart, numbered_axis
from qgate.charts.svg import color, cut_to_width, document, path
from qgate.checkpoints.record import WorstBlock
from qgate.text import brief, counted, decibels

Octaves = tuple[int, tuple[int, ...]]
_WIDTH, _HEIGHT = 440.0, 230.0
_AIR = 0.08


def add_octaves(several: Sequence[Octaves]) -> Octaves:
    """Add up counts of scales by octave."""
    low = min(start for start, _ in several)
    high = max(start + len(counts) for start, counts in several)
    total = [0] * (high - low)
    for start, counts in several:
        for at, count in enumerate(counts, start - low):
            total[at] += count
    return low, tuple(total)


def scale_histogram(title: str, octaves: Octaves) -> str:
    """Draw how many scales are in each octave, on a logarithmic axis of counts."""
    low, counts = octaves
    edges, (merged,) = axes.merge_octaves(low, [counts], range(len(counts)))
    x = axes.octaves(edges[0] - 0.5, edges[-1] + 0.5, LEFT, RIGHT, "scale")
    unit = "scales" if edges.step == 1 else f"scales in {edges.step} octaves"
    y = axes.log_count_axis(max(merged), BOTTOM, TOP + 16, unit)
    bars = axes.octave_bars(edges, merged, x, y, 0.5 if len(merged) < 60 else 0.0)
    sheets = path(bars, fill=color("blue"), data_bars="counts")
    text = f"{counted(sum(counts), 'scale')} from 2^{low} to 2^{low + len(counts)}."
    return axes.panel(x, y, sheets, "", title, text)


def block_chart(block: WorstBlock) -> str:
    """Draw what a block stores over its parent's values, column by column."""
    lines = color_lines([Line("stored", block.values), Line("parent", block.parent)])
    values = lines.values or [0.0]
    low, high = min(values), max(values)
    air = _AIR * (high - low) or 1.0
    x = numbered_axis(lines.colored, len(block.values), _WIDTH, "column", block.column)
    y = axes.linear(low - air, high + air, BOTTOM, TOP, "", 5)
    scale = "not finite" if block.scale is None else brief(block.scale)
    error = "not finite" if not block.error else decibels(10 * math.log10(block.error))
    title = f"{cut_to_width(block.name, 300, 13)}, row {block.row}"
    text = f"Scale {scale}; error of the block over its energy {error}."
    body = line_chart(lines, x, y, [("", text)], width=_WIDTH)
    return document(_WIDTH, _HEIGHT, title, text, body)
