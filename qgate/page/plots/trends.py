"""A value over runs: one line per series, with the commit and the date of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qgate.page.plots import _axes, _lines
from qgate.page.plots._lines import Line
from qgate.page.plots.svg import brief, cut_to_width, document, label, markers, times
from qgate.text import one_line

HEIGHT, BOTTOM = 250.0, 210.0
# A change of a value from one run to the next that is worth a title.
CHANGED = 1.2
# Values further apart than this are drawn on a logarithmic axis.
FAR_APART = 20.0
MOST_RUNS = 120


@dataclass(frozen=True)
class TrendPoint:
    """One run: what it is called, when it began (ISO 8601), its commit, and what it measured."""

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
    trends: Sequence[Trend],
    *,
    measure: str = "relative MSE",
    width: float = _axes.WIDTH,
    counts: bool = False,
) -> str:
    """Values over the numbers of runs, oldest first; failed runs are crossed. `counts` are whole
    numbers from zero on."""
    every = runs_of(trends)
    runs = every[-MOST_RUNS:]
    ranked = [
        line
        for line, _ in sorted(
            ((_line(trend, runs), trend) for trend in trends),
            key=lambda pair: (-_change(pair[0]), pair[0].name),
        )
    ]
    chosen = _lines.chosen(ranked)
    right = width - _lines.name_room(chosen.colored) - 2
    air = 0.02 * len(runs) + 0.15
    x = _axes.Axis("linear", -air, max(len(runs) - 1, 0) + air, _axes.LEFT, right)
    texts = [f"{(commit or name)[:7]}\n{when[:10]}" for when, commit, name in runs]
    last = len(runs) - 1
    order = [last, 0, *range(last, -1, -1)] if runs else []
    x = replace(x, ticks=_lines.thinned(texts, x, list(dict.fromkeys(order))))
    lost = _lost(trends, runs)
    y = _value_axis(chosen.values, _axes.TOP + (14 if lost else 4), measure, counts)
    y = y if chosen.values else replace(y, ticks=())
    drawn = _lines.drawn(chosen, x, y) + _crosses(trends, runs, x, y, lost)
    failed = {point.run for trend in trends for point in trend.points if point.failed}
    entries = _lines.gray_key(len(chosen.gray), "series")
    if failed:
        words = "failed (at the top: without value)" if lost and not entries else "failed"
        entries.append((markers("cross", [(0, 0)], "red"), words))
    body = _axes.frame(x, y, drawn, width=width) + _lines.names(chosen.colored, x, y)
    body += _axes.legend(entries, width - 4)
    if not runs:
        body += label(width / 2, 130, "no runs", "middle", fill="muted")
    shown = "" if len(every) == len(runs) else f", the latest {len(runs)} drawn"
    said = f"{len(trends)} series over {len(every)} runs{shown}, {len(failed)} with failures."
    return document(width, HEIGHT, trend_finding(trends, measure, counts), said, body)


def runs_of(trends: Sequence[Trend]) -> list[tuple[str, str, str]]:
    """All runs once, oldest first where all say when they were."""
    runs = list(dict.fromkeys(point.run for trend in trends for point in trend.points))
    return sorted(runs) if all(when for when, _, _ in runs) else runs


def _line(trend: Trend, runs: Sequence[tuple[str, str, str]]) -> Line:
    values = {point.run: point.value for point in trend.points}
    return Line(trend.name, tuple(values.get(run) for run in runs))


def _change(line: Line) -> float:
    """By which factor the latest value differs from the one before; a change from zero is most."""
    known = [value for value in line.values if value is not None]
    if len(known) < 2 or known[-1] == known[-2]:
        return 1.0
    now, before = known[-1], known[-2]
    if now * before <= 0:
        return 1e300
    return max(now / before, before / now)


def _value_axis(values: Sequence[float], top: float, measure: str, counts: bool) -> _axes.Axis:
    if counts:
        most = max(values, default=0.0)
        return _axes.counted(1.06 * most, BOTTOM, top, measure)
    positive = [value for value in values if value > 0]
    if positive and min(values) >= 0 and max(positive) >= FAR_APART * min(positive):
        return _axes.logarithmic(values, BOTTOM, top, measure)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and low < 0.7 * high:
        low = 0.0
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = low if low == 0 and high > 0 else low - air
    return _axes.linear(bottom, high + air, BOTTOM, top, measure)


def _lost(trends: Sequence[Trend], runs: Sequence[tuple[str, str, str]]) -> set[int]:
    """Failed runs without a value, by their numbers: their crosses stand in a row at the top."""
    place = {run: at for at, run in enumerate(runs)}
    return {
        place[point.run]
        for trend in trends
        for point in trend.points
        if point.failed and point.value is None and point.run in place
    }


def _crosses(
    trends: Sequence[Trend],
    runs: Sequence[tuple[str, str, str]],
    x: _axes.Axis,
    y: _axes.Axis,
    lost: set[int],
) -> str:
    place = {run: at for at, run in enumerate(runs)}
    points = [
        (x.place(place[point.run]), y.place(point.value))
        for trend in trends
        for point in trend.points
        if point.failed and point.value is not None and point.run in place
    ]
    points += [(x.place(at), _axes.TOP + 5) for at in sorted(lost)]
    return markers("cross", points, "red") if points else ""


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
    known = [value for value in worst.values if value is not None]
    if counts and len(lines) == 1 and len(known) > 1:
        return _counted(one_line(measure), round(known[-1]), round(known[-2]))
    change = _change(worst)
    if change < CHANGED or worst.values[-1] is None:
        much = f"{100 * (CHANGED - 1):.0f} %"
        if latest:
            kept = f"{one_line(measure)} within {much} of the run before"
            return f"The latest run failed, with its {kept}"
        words = f"{one_line(measure)}: all within {much} of the run before"
        return words[0].upper() + words[1:]
    name = cut_to_width(worst.name, 120, 13)
    now, before = known[-1], known[-2]
    if change >= 1e300:
        return f"{start}{name} went from {brief(before)} to {brief(now)}"
    rose = "rose" if now > before else "fell"
    return f"{start}{name} {rose} {times(change)}, from {brief(before)} to {brief(now)}"


def _counted(measure: str, now: int, before: int) -> str:
    """`6 failed gates in the latest run, 5 in the run before`."""
    measure = measure.removesuffix("s") if now == 1 else measure
    if now == before:
        return f"{now:,} {measure} in the latest run, as many as in the run before"
    return f"{now:,} {measure} in the latest run, {before:,} in the run before"
