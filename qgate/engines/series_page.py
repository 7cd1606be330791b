"""The page of a series of steps: the drift first, its figures, the pictures, all steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgate.charts.pages import Cell, Evidence, HeadView, number, render
from qgate.charts.svg import LIGHT, STYLE
from qgate.engines.series_plots import series_charts
from qgate.engines.series_record import SeriesRecord, StepDistances
from qgate.engines.series_texts import HEAD, drift_text, headline, step_row
from qgate.text import brief, shortened

_NARROW = {"steps": (HEAD, {"step": 20, "mean": 27, "99 %": 27, "share beyond": 26})}
"""What a phone shows of the table, with the widths of columns in percent."""
_FACTS = (
    ("mean", "KL from the second engine to the first per token where both have logits, else its "
     "estimate k3 from the tokens' probabilities, in nats"),
    ("99 %", "its upper percentile over the tokens of a step"),
    ("chi2", "mean of (r - 1)^2, where r is the ratio of probabilities of a token"),
    ("share beyond", "tokens whose ratio of probabilities is outside 0.8 to 1.25"),
    ("chance", "share of series without a drift, with neighboring steps as alike, that look as "
     "much like one"),
)  # fmt: skip


def page(series: SeriesRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    title = headline(series)
    tone = "fail" if series.failed else "warn" if series.drifts or series.notes else "good"
    return render(
        "engines/series",
        title=shortened(title, 120),
        plot_style=f"{STYLE}@media print{{.plot{{{LIGHT}}}}}",
        heading=title,
        tone=tone,
        head_view=_head_view(series, tone),
        evidence=list(_evidence(series)),
        links=[
            ("findings", "Findings", len(series.drifts) + len(series.beyond)),
            ("pictures", "Along the steps", 0),
            ("all", "All steps", len(series.steps)),
            ("files", "Files", len(files)),
        ],
        narrow=_NARROW,
        pictures=series_charts(series),
        step_head=HEAD,
        steps=[_step(step) for step in series.steps],
        files=files,
        notes=series.notes,
    )


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
    if not (series.drifts or series.beyond):
        yield Evidence("good" if not series.notes else "info", "series", headline(series))


def _step(step: StepDistances) -> list[Cell]:
    """Return the cells of a step, each sorted by its number."""
    values = (step.step, step.tokens, step.mean, step.q99, step.chi2, step.beyond, step.largest)
    return [number(float(v), text) for v, text in zip(values, step_row(step), strict=True)]
