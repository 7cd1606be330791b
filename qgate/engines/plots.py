"""Pictures of a comparison as inline SVG: differences along the positions of samples."""

from __future__ import annotations

from qgate.charts import axes
from qgate.charts.axes import BOTTOM, TOP
from qgate.charts.lines import Line, color_lines, line_chart, numbered_axis
from qgate.charts.svg import cut_to_width, document
from qgate.engines.record import PositionProfile, SampleDifferences
from qgate.text import percent

_WIDTH, _HEIGHT = 440.0, 230.0
_FIRST = 1
"""Position of the first token that has a log-probability."""
_AIR = 0.08


def profile_chart(profile: PositionProfile) -> str:
    """Draw the mean and the largest size of the differences at each position of all samples."""
    lines = color_lines([Line("largest", profile.largest), Line("mean", profile.mean)])
    count, step = len(profile.mean), profile.step
    x = numbered_axis(lines.colored, count, _WIDTH, "position", _FIRST, step)
    y = axes.logarithmic(lines.values, BOTTOM, TOP, "size of the difference (nats)")
    pace = f", each over {step:,} positions" if step > 1 else ""
    text = f"Differences of log-probabilities at {count:,} places{pace}."
    body = line_chart(lines, x, y, (), width=_WIDTH)
    return document(_WIDTH, _HEIGHT, "all samples, by position", text, body)


def sample_chart(sample: SampleDifferences) -> str:
    """Draw the difference of each token of one sample."""
    lines = color_lines([Line("A less B", sample.differences)])
    values = lines.values or [0.0]
    low, high = min(0.0, *values), max(0.0, *values)
    air = _AIR * (high - low) or 1.0
    x = numbered_axis(
        lines.colored, len(sample.differences), _WIDTH, "position", _FIRST, sample.step
    )
    y = axes.linear(low - air, high + air, BOTTOM, TOP + 14, "nats", 5)
    title = f"sample {cut_to_width(sample.sample, 300, 13)}"
    text = f"{percent(sample.share)} of the difference"
    body = line_chart(lines, x, y, [("", text)], width=_WIDTH)
    return document(_WIDTH, _HEIGHT, title, f"It carries {text}.", body)
