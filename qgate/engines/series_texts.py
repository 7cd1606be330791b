"""A series of steps for the screen: whether it drifts, from which step on, then the figures."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from qgate.engines.change_points import FEWEST_STEPS
from qgate.engines.series_record import Drift, SeriesRecord, StepDistances
from qgate.text import brief, counted, one_line, percent

HEAD = ("step", "tokens", "mean", "99 %", "chi2", "share beyond", "largest")


def figure_name(series: SeriesRecord, figure: str) -> str:
    """Write out the name of a figure."""
    names = {
        "mean": f"mean {series.figure}",
        "99 %": f"99 % of {series.figure}",
        "chi2": "chi2",
        "share beyond": "share of tokens beyond a ratio of 1.25",
    }
    return names[figure]


def headline(series: SeriesRecord) -> str:
    """Return the result in one line: a drift, a limit, or that nothing drifts."""
    if series.drifts and series.drifts[0].rises:
        return drift_text(series, series.drifts[0])
    if series.beyond:
        return one_line(series.beyond[0])
    if series.drifts:
        return drift_text(series, series.drifts[0])
    means = [step.mean for step in series.steps]
    span = f"mean {series.figure} {brief(min(means))} to {brief(max(means))} nats per token"
    if len(means) < FEWEST_STEPS:
        steps = counted(len(means), "step")
        return f"{steps} are too few to tell a drift, which takes {FEWEST_STEPS}: {span}"
    return f"no drift in {len(means)} steps: {span}"


def drift_text(series: SeriesRecord, drift: Drift) -> str:
    """Say from which step on a figure changes, by how much, and at which module."""
    verb = "rises" if drift.rises else "falls"
    sides = f"{brief(drift.before)} before, {brief(drift.after)} "
    text = (
        f"{figure_name(series, drift.figure)} {verb} from step {drift.step} on "
        f"({between(drift)}): {sides}{'at the end' if drift.is_ramp else 'since then'}"
    )
    module = series.module
    if module is not None and drift is series.drifts[0]:
        text += (
            f"; it begins at {one_line(module.site)} (relative MSE {brief(module.before)}, then "
            f"{brief(module.after)})"
        )
    return text


def between(drift: Drift) -> str:
    """Write between which steps a change begins with 95 % confidence, and its chance."""
    is_wide = drift.first < drift.last
    steps = f"{drift.first} to {drift.last}" if is_wide else "no other step fits"
    return f"{steps}; chance {brief(drift.chance, 1)}"


def result_lines(series: SeriesRecord, limit: int = 10) -> Iterator[str]:
    """Say whether the engines drift apart, and give the figures of the last steps."""
    yield headline(series)
    drifts = (drift_text(series, drift) for drift in series.drifts)
    findings = [*drifts, *map(one_line, series.beyond)]
    yield from [text for text in findings[: limit + 1] if text != headline(series)]
    if len(findings) > limit + 1:
        yield f"… and {counted(len(findings) - limit - 1, 'finding')} more"
    yield ""
    rows = [step_row(step) for step in series.steps[-limit:]]
    yield tabulate(rows, HEAD, tablefmt="simple", disable_numparse=True)
    if len(series.steps) > limit:
        yield f"… and {counted(len(series.steps) - limit, 'step')} before"
    yield from (f"note: {one_line(note)}" for note in series.notes)


def step_row(step: StepDistances) -> tuple[str, ...]:
    """Write the figures of a step, as `HEAD` names them."""
    figures = (step.mean, step.q99, step.chi2)
    return (
        str(step.step),
        f"{step.tokens:,}",
        *map(brief, figures),
        percent(step.beyond),
        brief(step.largest),
    )
