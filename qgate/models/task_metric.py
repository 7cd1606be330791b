"""Metric of a model's own task: what its callable asks for, and the figures that it returns."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qgate.errors import QgateError
from qgate.interruptions import raise_interruption, raised_by_users
from qgate.text import shortened

TaskMetric = Callable[..., Any]
_LONGEST = 80
GIVEN = ("outputs", "reference", "inputs")
_ALLOWED = "It returns one finite number, or a list, tuple or tensor with one for each of the"


@dataclass(frozen=True)
class TaskFigures:
    """Figure of a task, and that of each sample; none where the metric is one number for all."""

    figure: float
    samples: tuple[float, ...] = ()


def metric_name(metric: TaskMetric) -> str:
    """Return what results call a metric: the name of its function or class."""
    inner = metric.func if isinstance(metric, partial) else metric
    name = str(getattr(inner, "__name__", type(inner).__name__))
    return name if name.isascii() and name.isidentifier() else "metric"


def check_metric(metric: TaskMetric | None, model: str) -> None:
    """Refuse a metric that asks for what there is not, or for nothing that a mode changes."""
    if metric is None:
        return
    if not callable(metric):
        raise QgateError(
            f"metric {metric!r} of {model} is {type(metric).__name__}: give a callable, such as "
            "def accuracy(outputs, inputs)."
        )
    parameters = _parameters(metric, model)
    about = f"metric {metric_name(metric)} of {model}"
    for name, parameter in parameters.items():
        is_known = name in GIVEN or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not is_known and parameter.default is parameter.empty:
            raise QgateError(
                f"{about} asks for {name!r}, which there is not: its parameters are among "
                f"{', '.join(GIVEN)}; others need a default."
            )
    if "outputs" not in _asked(parameters):
        raise QgateError(
            f"{about} does not ask for `outputs`: it is the same in each mode. Give it a parameter "
            "of that name."
        )


def task_figures(
    metric: TaskMetric, model: str, mode: str, given: Mapping[str, Sequence[Any]]
) -> TaskFigures:
    """Call a metric with copies of what it asks for, and read what it returns."""
    about = f"metric {metric_name(metric)} of {model}, mode {mode},"
    parameters = _parameters(metric, model)
    arguments = {name: copy.deepcopy(list(given[name])) for name in _asked(parameters)}
    by_place: list[Any] = [
        arguments.pop(name, parameter.default)
        for name, parameter in parameters.items()
        if parameter.kind == parameter.POSITIONAL_ONLY
    ]
    try:
        returned = metric(*by_place, **arguments)
    except raised_by_users() as error:
        raise_interruption()
        raise QgateError(f"{about} raised {type(error).__name__}: {error}") from error
    return _read(returned, len(given["inputs"]), about)


def _parameters(metric: TaskMetric, model: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(metric).parameters
    except (TypeError, ValueError):
        raise QgateError(
            f"metric {metric_name(metric)} of {model} does not say what its parameters are: wrap "
            "it in a function with parameters among outputs, reference, inputs."
        ) from None


def _asked(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names that a metric is given; all where it takes any."""
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return [name for name in GIVEN if takes_any or name in parameters]


def _read(returned: Any, count: int, about: str) -> TaskFigures:
    plain = _plain(returned)
    allowed = f"{_ALLOWED} {count} samples."
    if not isinstance(plain, list | tuple):
        return TaskFigures(_figure(plain, returned, "", about, allowed))
    if len(plain) != count:
        raise QgateError(f"{about} returned {len(plain)} figures for {count} samples. {allowed}")
    figures = tuple(
        _figure(_plain(figure), figure, f" for sample {number}", about, allowed)
        for number, figure in enumerate(plain)
    )
    return TaskFigures(sum(figures) / count, figures)


def _plain(value: Any) -> Any:
    """Return numbers and lists of them in place of tensors and arrays."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _figure(plain: Any, returned: Any, sample: str, about: str, allowed: str) -> float:
    if not isinstance(plain, int | float):
        text = shortened(repr(returned), _LONGEST)
        raise QgateError(f"{about} returned {text}{sample}, which is no number. {allowed}")
    try:
        figure = float(plain)
    except OverflowError:
        figure = math.inf
    if not math.isfinite(figure):
        raise QgateError(f"{about} returned {figure}{sample}. {allowed}")
    return figure
