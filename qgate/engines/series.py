"""Compare two engines at every step of a run, and find the step from which on they drift apart."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qgate.comparing.dump_comparison import compare_dumps
from qgate.engines.change_points import FEWEST_STEPS, LEAST_RATIO, find_change
from qgate.engines.comparison import site_of
from qgate.engines.compute import TokenValues, figures_of, values_of
from qgate.engines.findings import EngineLimits, hold_limits
from qgate.engines.opening import EnginePair, open_pair
from qgate.engines.record import EnginesRecord
from qgate.engines.series_record import Drift, ModuleGrowth, SeriesRecord, StepDistances
from qgate.errors import QgateError
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder
from qgate.storage.locations import user_location
from qgate.text import counted, listed

CLIPPED = math.log(1.25)
"""Size of a difference of log-probabilities about where PPO with a clip of 0.2 begins to clip."""
ALARM = 1e-3
"""Chance of a change by accident below which it is reported."""
_ACTUAL, _REFERENCE = ("trainer", "actual"), ("rollout", "engine", "reference")
STEP = re.compile(r"(?:.*?[^0-9])?([0-9]+)")
"""Name of the folder of a step."""
_QUARTERS = 4
_GROWN = 2.0
"""Growth of a module's difference that a drift has at least."""
_LEAST_MSE = 1e-14
"""Relative MSE that sums in another order make."""


@dataclass(frozen=True)
class StepEngines:
    """The two engines of one step: their paths."""

    step: int
    actual: str
    reference: str


def find_steps(folder: str) -> list[StepEngines]:
    """List the steps in a folder, in order: folders with a number, of two engines each."""
    home = folder_of(user_location(folder))
    if home.kind() != "folder":
        raise QgateError(f"there is no folder {folder!r} of steps.")
    steps: dict[int, StepEngines] = {}
    for name, is_folder in sorted(home.names().items()):
        match = STEP.fullmatch(name)
        if match is None or not is_folder:
            continue
        number = int(match[1])
        if number in steps:
            raise QgateError(f"{folder!r} has step {number} twice: {name!r} is the second one.")
        steps[number] = _step_engines(number, home.inside(name))
    if not steps:
        raise QgateError(
            f"{folder!r} has no steps: it should hold a folder per step with its number in the "
            "name, such as step-12, with trainer.npz and rollout.npz."
        )
    return [steps[number] for number in sorted(steps)]


def _step_engines(number: int, home: Folder) -> StepEngines:
    names = [name for name in home.names() if not name.startswith(".")]

    def path(allowed: Sequence[str]) -> str:
        chosen = [name for name in names if name.split(".")[0] in allowed]
        if len(chosen) != 1:
            raise QgateError(
                f"step {number}, {str(home.location)!r}, needs one file or dump that is called "
                f"{' or '.join(allowed)}, such as {allowed[0]}.npz; it has {listed(names, 8)}."
            )
        return str(home.at(chosen[0]))

    return StepEngines(number, path(_ACTUAL), path(_REFERENCE))


def compare_steps(
    folder: str,
    *,
    head: str = "",
    limits: EngineLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SeriesRecord:
    """Compare two engines at every step in a folder, and find where they drift apart.

    head      the module of dumps whose output is the logits
    limits    figures above which a step fails
    progress  called with the number of steps done, and of all
    """
    steps = find_steps(folder)
    reasons: dict[str, list[str]] = {}
    rows, kinds = [], set()
    for number, engines in enumerate(steps):
        if progress is not None:
            progress(number, len(steps))
        try:
            record, values = _compared(open_pair(engines.actual, engines.reference, head))
        except QgateError as error:
            raise QgateError(f"step {engines.step}: {error}") from None
        kinds.add(record.figures.kl is not None)
        rows.append(_step_figures(engines.step, record, values))
        for figure in hold_limits(record, limits or EngineLimits()):
            if figure.reason:
                reason = f"step {engines.step}: {figure.reason}"
                reasons.setdefault(figure.figure, []).append(reason)
    if len(kinds) > 1:
        raise QgateError(
            f"some steps in {folder!r} have logits of both engines, and some have none: their KL "
            "cannot be compared. Give the same kind of file at each step."
        )
    beyond = [_first_of(texts) for texts in reasons.values()]
    series = SeriesRecord(folder, tuple(rows), kinds.pop(), find_drifts(rows), beyond=beyond)
    if len(rows) < FEWEST_STEPS:
        series.notes.append(
            f"{len(rows)} steps are too few to tell a drift: it takes {FEWEST_STEPS}"
        )
    if series.drifts and series.drifts[0].rises:
        _add_module(series, steps, head)
    return series


def _first_of(texts: Sequence[str]) -> str:
    """Return the first reason, and how many more steps exceed that limit."""
    more = len(texts) - 1
    return f"{texts[0]}, as are {counted(more, 'more step')}" if more else texts[0]


def _compared(pair: EnginePair) -> tuple[EnginesRecord, list[TokenValues]]:
    values = values_of(pair.samples)
    figures = figures_of(pair.samples, values)
    return EnginesRecord(pair.actual.label, pair.reference.label, figures), values


def _step_figures(step: int, record: EnginesRecord, values: Sequence[TokenValues]) -> StepDistances:
    figures = record.figures
    finite = [value.finite for value in values]
    difference, k3 = (
        np.concatenate([column[mask] for column, mask in zip(columns, finite, strict=True)])
        for columns in ([v.difference for v in values], [v.k3 for v in values])
    )
    size = figures.k3 if figures.kl is None else figures.kl
    q99 = float(np.quantile(k3, 0.99)) if figures.kl_spread is None else figures.kl_spread.q99
    # Of each token the quarter of its own sample that it is in.
    places = np.concatenate([np.arange(len(m))[m] * _QUARTERS // len(m) for m in finite])
    counts = np.maximum(np.bincount(places, minlength=_QUARTERS), 1)
    return StepDistances(
        step=step,
        tokens=figures.tokens,
        samples=figures.samples,
        mean=size.mean,
        half_interval=size.half_interval,
        q99=q99,
        chi2=float(np.square(np.expm1(np.minimum(difference, 300.0))).mean()),
        beyond=float((np.abs(difference) > CLIPPED).mean()),
        largest=figures.magnitude.largest,
        quarters=tuple((np.bincount(places, k3, _QUARTERS) / counts).tolist()),
        flips=None if figures.flips is None else figures.flips.mean,
    )


def find_drifts(steps: Sequence[StepDistances]) -> list[Drift]:
    """Find the figures that change at a step, rises first, and of them the mean."""
    columns: Mapping[str, list[float]] = {
        "mean": [step.mean for step in steps],
        "99 %": [step.q99 for step in steps],
        "chi2": [step.chi2 for step in steps],
        "share beyond": [step.beyond for step in steps],
    }
    drifts = []
    for figure, values in columns.items():
        change = find_change(values)
        if change is None or change.chance > ALARM:
            continue
        if max(change.ratio, 1 / max(change.ratio, 1e-300)) < LEAST_RATIO:
            continue
        start, first, last = (steps[at].step for at in (change.start, change.first, change.last))
        levels = change.chance, change.before, change.after, change.is_ramp
        drifts.append(Drift(figure, start, first, last, *levels))
    return sorted(drifts, key=lambda d: (not d.rises, d.figure != "mean", d.chance))


# Modules -----------------------------------------------------------------------------------------


def _add_module(series: SeriesRecord, steps: Sequence[StepEngines], head: str) -> None:
    """Name the first module whose difference grew from before the drift to the last step."""
    start = [engines.step for engines in steps].index(series.drifts[0].step)
    errors = [_site_errors(steps[at], head) for at in (start - 1, len(steps) - 1)]
    before, after = errors
    if not (before and after):
        series.notes.append("the steps are no dumps of modules: where the drift begins is not told")
        return
    growth = {
        site: (before[site], value, value / max(before[site], _LEAST_MSE))
        for site, value in after.items()
        if site in before and not math.isnan(value)
    }
    largest = max((times for _, _, times in growth.values()), default=0.0)
    if largest < _GROWN:
        series.notes.append("no module's difference grew: the drift is in what comes after them")
        return
    # What follows a module that drifts grows with it; what comes before does not.
    site = next(s for s, (_, _, times) in growth.items() if times >= math.sqrt(largest))
    series.module = ModuleGrowth(site, *growth[site][:2])


def _site_errors(engines: StepEngines, head: str) -> dict[str, float]:
    """Return the relative MSE of each tensor of the modules, in the order of execution."""
    pair = open_pair(engines.actual, engines.reference, head)
    if pair.actual.dump is None or pair.reference.dump is None:
        return {}
    errors: dict[str, float] = {}
    for row in compare_dumps(pair.actual.dump, pair.reference.dump, operation="forward").pairs:
        if row.kind not in ("summary", "unfit"):
            site = site_of(row.title)
            errors[site] = max(errors.get(site, 0.0), row.relative_mse)
    return errors
