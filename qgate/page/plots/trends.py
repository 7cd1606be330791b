"""Plot of a value over runs: one line per series, with commit and date of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qgate.charts import axes
from qgate.charts.lines import Line, color_lines, gray_key, line_chart, position_axis, thin_ticks
from qgate.charts.svg import brief, cut_to_width, document, markers, times
from qgate.text import one_line

HEIGHT, BOTTOM = 250.0, 210.0
# A change of a value from one run to the next that is worth a title.
CHANGED = 1.2
# Values further apart than this are drawn on a logarithmic axis.
FAR_APART = 20.0
MOST_RUNS = 120


@dataclass(frozen=True)
class TrendPoint:
    """The value of one run, with its name, start (ISO 8601) and commit."""

    label: str
    when: str
    commit: str
    value: float | None
    failed: bool

    @property
    def run(self) -> tuple[str, str, str]:
        return self.when, self.commit, self.label


@dataclass(frozen=True)
class Trend:
    """One series over runs, such as a mode or a gate."""

    name: str
    points: tuple[TrendPoint, ...]


def trend_lines(
    trends: Sequence[Trend], *, measure: str = "relative MSE", counts: bool = False
) -> str:
    """Draw values over runs, oldest first, failed runs crossed.

    `counts` are whole numbers from zero on.
    """
    every = runs_of(trends)
    runs = every[-MOST_RUNS:]
    chosen = color_lines(
        sorted(
            (_line(trend, runs) for trend in trends), key=lambda line: (-_change(line), line.name)
        )
    )
    x = position_axis(len(runs), chosen.colored, axes.WIDTH)
    texts = [f"{(commit or name)[:7]}\n{when[:10]}" for when, commit, name in runs]
    last = len(runs) - 1
    order = [last, 0, *range(last, -1, -1)] if runs else []
    x = replace(x, ticks=thin_ticks(texts, x, list(dict.fromkeys(order))))
    positions = {run: at for at, run in enumerate(runs)}
    points = [point for trend in trends for point in trend.points]
    crossed = [point for point in points if point.failed and point.run in positions]
    # Failed runs without a value: their crosses stand in a row at the top.
    lost = sorted({positions[point.run] for point in crossed if point.value is None})
    y = _value_axis(chosen.values, axes.TOP + (14 if lost else 4), measure, counts)
    y = y if chosen.values else replace(y, ticks=())
    crosses = [
        (x.place(positions[point.run]), y.place(point.value))
        for point in crossed
        if point.value is not None
    ]
    crosses += [(x.place(at), axes.TOP + 5) for at in lost]
    failed = {point.run for point in points if point.failed}
    entries = gray_key(len(chosen.gray), "series")
    if failed:
        words = "failed (at the top: without value)" if lost and not entries else "failed"
        entries.append((markers("cross", [(0, 0)], "red"), words))
    over = markers("cross", crosses, "red")
    nothing = "" if runs else "no runs"
    body = line_chart(chosen, x, y, entries, width=axes.WIDTH, over=over, nothing=nothing)
    limited = "" if len(every) == len(runs) else f", the latest {len(runs)} drawn"
    description = (
        f"{len(trends)} series over {len(every)} runs{limited}, {len(failed)} with failures."
    )
    return document(axes.WIDTH, HEIGHT, trend_finding(trends, measure, counts), description, body)


def runs_of(trends: Sequence[Trend]) -> list[tuple[str, str, str]]:
    """Return all runs once, oldest first where all have a start."""
    runs = list(dict.fromkeys(point.run for trend in trends for point in trend.points))
    return sorted(runs) if all(when for when, _, _ in runs) else runs


def _line(trend: Trend, runs: Sequence[tuple[str, str, str]]) -> Line:
    values = {point.run: point.value for point in trend.points}
    return Line(trend.name, tuple(values.get(run) for run in runs))


def _change(line: Line) -> float:
    """Return the factor between the latest value and the one before; huge from zero."""
    measured = [value for value in line.values if value is not None]
    if len(measured) < 2 or measured[-1] == measured[-2]:
        return 1.0
    now, before = measured[-1], measured[-2]
    if now * before <= 0:
        return 1e300
    return max(now / before, before / now)


def _value_axis(values: Sequence[float], top: float, measure: str, counts: bool) -> axes.Axis:
    if counts:
        most = max(values, default=0.0)
        return axes.count_axis(1.06 * most, BOTTOM, top, measure)
    positive = [value for value in values if value > 0]
    if positive and min(values) >= 0 and max(positive) >= FAR_APART * min(positive):
        return axes.logarithmic(values, BOTTOM, top, measure)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and low < 0.7 * high:
        low = 0.0
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = low if low == 0 and high > 0 else low - air
    return axes.linear(bottom, high + air, BOTTOM, top, measure)


def trend_finding(trends: Sequence[Trend], measure: str = "value", counts: bool = False) -> str:
    runs = runs_of(trends)
    if not runs:
        return "No runs yet"
    lines = [_line(trend, runs) for trend in trends]
    latest = any(p.failed for trend in trends for p in trend.points if p.run == runs[-1])
    if len(runs) == 1:
        return f"One run, which {'failed' if latest else 'passed'}: a trend needs two"
    start = "The latest run failed: " if latest else ""
    worst = max(lines, key=_change)
    measured = [value for value in worst.values if value is not None]
    if counts and len(lines) == 1 and len(measured) > 1:
        return _counted(one_line(measure), round(measured[-1]), round(measured[-2]))
    change = _change(worst)
    if change < CHANGED or worst.values[-1] is None:
        much = f"{100 * (CHANGED - 1):.0f} %"
        if latest:
            measure_text = f"{one_line(measure)} within {much} of the run before"
            return f"The latest run failed, with its {measure_text}"
        words = f"{one_line(measure)}: all within {much} of the run before"
        return words[0].upper() + words[1:]
    name = cut_to_width(worst.name, 120, 13)
    now, before = measured[-1], measured[-2]
    if change >= 1e300:
        return f"{start}{name} went from {brief(before)} to {brief(now)}"
    rose = "rose" if now > before else "fell"
    return f"{start}{name} {rose} {times(change)}, from {brief(before)} to {brief(now)}"


def _counted(measure: str, now: int, before: int) -> str:
    """Return `6 failed gates in the latest run, 5 in the run before`."""
    measure = measure.removesuffix("s") if now == 1 else measure
    if now == before:
        return f"{now:,} {measure} in the latest run, as many as in the run before"
    return f"{now:,} {measure} in the latest run, {before:,} in the run before"
