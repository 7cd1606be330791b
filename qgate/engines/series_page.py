"""The page of a series of steps: the drift first, its figures, the pictures, all steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgate.charts import svg
from qgate.charts.lines import (
    Line,
    color_lines,
    line_chart,
    position_axis,
    thin_ticks,
)
from qgate.charts.pages import Cell, Evidence, HeadView, number
from qgate.charts.reports import Section, SectionTable, report_page
from qgate.charts.svg import BOTTOM, TOP, box, color, document, path
from qgate.engines.series_record import Drift, SeriesRecord, StepDistances
from qgate.engines.series_texts import HEAD, drift_text, headline, step_row
from qgate.text import brief

_PHONE = {"step": 20, "mean": 27, "99 %": 27, "share beyond": 26}
"""Columns that a phone shows, with their widths in percent."""
_FACTS = (
    ("mean", "KL from the second engine to the first per token where both have logits, else its "
     "estimate k3 from the tokens' probabilities, in nats"),
    ("99 %", "its upper percentile over the tokens of a step"),
    ("chi2", "mean of (r - 1)^2, where r is the ratio of probabilities of a token"),
    ("share beyond", "tokens whose ratio of probabilities is outside 0.8 to 1.25"),
    ("chance", "share of series without a drift, with neighboring steps as alike, that look as "
     "much like one"),
)  # fmt: skip

_BANDS = (
    "A dashed line marks the step from which on a figure changes, and the band around it where the "
    "change begins with 95 % confidence."
)
_WIDTH, _HEIGHT = 440.0, 240.0


def page(series: SeriesRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    title = headline(series)
    tone = "fail" if series.failed else "warn" if series.drifts or series.notes else "good"
    return report_page(
        [
            Section(
                anchor="findings", title="Findings", evidence=list(_evidence(series)),
                total=len(series.drifts) + len(series.beyond), empty="Nothing drifts.",
            ),
            Section(
                anchor="pictures", title="Along the steps", about=_BANDS if series.drifts else "",
                figures=series_charts(series),
            ),
            Section(anchor="all", title="All steps", total=len(series.steps), tables=[SectionTable(
                head=HEAD, rows=[_step(step) for step in series.steps], words=1, label="steps",
                name="steps", narrow=_PHONE,
            )]),
        ],
        verdict=title, tone=tone, head_view=_head_view(series, tone), files=files,
        notes=series.notes,
    )  # fmt: skip


def _head_view(series: SeriesRecord, tone: str) -> HeadView:
    rising = sum(drift.rises for drift in series.drifts)
    counts = [
        ("fail", rising, "rising", "#findings"),
        ("warn", len(series.drifts) - rising, "falling", "#findings"),
        ("fail", len(series.beyond), "beyond a limit", "#findings"),
    ]
    tokens = sum(step.tokens for step in series.steps)
    return HeadView(
        {"fail": "failed", "good": "passed", "warn": "open"}[tone],
        [row for row in counts if row[1]],
        [(len(series.steps), "steps"), (tokens, "tokens")],
        "What the figures mean",
        [("steps in", series.folder)],
        _FACTS,
    )


def _evidence(series: SeriesRecord) -> Iterator[Evidence]:
    for drift in series.drifts:
        tone, badge = ("fail", "rises") if drift.rises else ("warn", "falls")
        times = drift.after / drift.before if drift.before > 0 and drift.rises else None
        before, after = f"{brief(drift.before)} before", brief(drift.after)
        text = drift_text(series, drift)
        yield Evidence(tone, badge, text, value=after, limit=before, times=times)
    for reason in series.beyond:
        yield Evidence("fail", "exceeded", reason)


def _step(step: StepDistances) -> list[Cell]:
    """Return the cells of a step, each sorted by its number."""
    values = (step.step, step.tokens, step.mean, step.q99, step.chi2, step.beyond, step.largest)
    return [number(float(v), text) for v, text in zip(values, step_row(step), strict=True)]


def series_charts(series: SeriesRecord) -> list[str]:
    """Draw the figures along the steps; a band marks where their drift begins."""
    steps = series.steps
    quarters = ("first quarter", "second", "third", "last quarter")
    charts = [
        _chart(series, f"{series.figure} per token (nats)", ("mean", "99 %"), [
            Line("99 %", [step.q99 for step in steps]),
            Line("mean", [step.mean for step in steps]),
        ]),
        _chart(series, "chi2 of the tokens", ("chi2",), [
            Line("chi2", [step.chi2 for step in steps]),
        ]),
        _chart(series, "k3 in quarters of the samples (nats)", (), [
            Line(name, [step.quarters[at] for step in steps]) for at, name in enumerate(quarters)
        ]),
    ]  # fmt: skip
    shares = [Line("beyond 1.25", [step.beyond for step in steps])]
    if all(step.flips is not None for step in steps):
        shares.append(Line("top-1 flips", [step.flips for step in steps]))
    return [*charts, _chart(series, "share of tokens", ("share beyond",), shares)]


def _chart(series: SeriesRecord, title: str, figures: Sequence[str], lines: Sequence[Line]) -> str:
    colored = color_lines(lines)
    numbers = [str(step.step) for step in series.steps]
    x = position_axis(len(numbers), colored.colored, _WIDTH)
    spaced = [*range(0, len(numbers), max(1, len(numbers) // 6))]
    ticks = thin_ticks(numbers, x, spaced)
    x = svg.Axis("linear", x.low, x.high, x.start, x.end, ticks, "step")
    y = svg.logarithmic(colored.values, BOTTOM, TOP)
    drift = next((d for d in series.drifts if d.figure in figures), None)
    band = "" if drift is None else _band(series, drift, x)
    words = title if drift is None else f"{title}; it changes at step {drift.step}"
    body = band + line_chart(colored, x, y, (), width=_WIDTH)
    return document(_WIDTH, _HEIGHT, title, words, body)


def _band(series: SeriesRecord, drift: Drift, x: svg.Axis) -> str:
    """Mark the steps between which a drift begins."""
    at = {step.step: number for number, step in enumerate(series.steps)}
    start, end = x.place(at[drift.first] - 0.5), x.place(at[drift.last] + 0.5)
    area = path(box(start, TOP, end - start, BOTTOM - TOP), fill=color("red"), fill_opacity=0.18)
    return area + svg.rule(x.place(at[drift.step]), TOP, "red", "3 2")
