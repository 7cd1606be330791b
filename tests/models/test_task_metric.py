"""A metric of one's own: it gets what it names, and what it returns is figures or one error."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qgate
from qgate.errors import QgateError
from qgate.models.task_metric import TaskFigures, metric_name, task_figures

GIVEN = {
    "outputs": [torch.tensor([[1.0]]), torch.tensor([[2.0]])],
    "reference": [torch.tensor([[1.5]]), torch.tensor([[2.5]])],
    "inputs": [{"x": torch.tensor([3.0])}, {"x": torch.tensor([4.0])}],
}


def model(metric: Any) -> qgate.Model:
    return qgate.Model(nn.Linear(2, 2), [torch.zeros(1, 2)], "tiny", metric=metric)


def figures(metric: Callable[..., Any]) -> TaskFigures:
    return task_figures(metric, "tiny", "int8", GIVEN)


def everything(outputs: Any, reference: Any, inputs: Any) -> list[float]:
    pairs = zip(outputs, reference, inputs, strict=True)
    return [float(a - r + sample["x"]) for a, r, sample in pairs]


def by_place(outputs: Any, /, inputs: Any) -> list[float]:
    return [float(a + sample["x"]) for a, sample in zip(outputs, inputs, strict=True)]


def anything(**given: Any) -> int:
    return len(given)


def with_default(outputs: Any, top: int = 5) -> int:
    return top + len(outputs)


class Accuracy:
    def __call__(self, outputs: Any) -> float:
        return float(outputs[0])


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (everything, TaskFigures(3.0, (2.5, 3.5))),
        (by_place, TaskFigures(5.0, (4.0, 6.0))),
        (anything, TaskFigures(3.0)),
        (with_default, TaskFigures(7.0)),
        (functools.partial(with_default, top=1), TaskFigures(3.0)),
        (Accuracy(), TaskFigures(1.0)),
    ],
)
def test_a_metric_gets_what_it_names(metric: Any, expected: TaskFigures) -> None:
    assert model(metric).metric is metric
    assert figures(metric) == expected


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.5, TaskFigures(0.5)),
        (True, TaskFigures(1.0)),
        (np.float32(0.5), TaskFigures(0.5)),
        (torch.tensor(0.5), TaskFigures(0.5)),
        ((0, 1), TaskFigures(0.5, (0.0, 1.0))),
        ([torch.tensor(0.25), np.float64(0.75)], TaskFigures(0.5, (0.25, 0.75))),
        (torch.tensor([True, False]), TaskFigures(0.5, (1.0, 0.0))),
        (np.array([1, 2]), TaskFigures(1.5, (1.0, 2.0))),
    ],
)
def test_numbers_of_any_kind_are_figures(returned: Any, expected: TaskFigures) -> None:
    assert figures(lambda outputs: returned) == expected  # noqa: ARG005


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (math.nan, "returned nan. It returns one finite number"),
        (torch.tensor(math.inf), "returned inf. It"),
        (10**400, "returned inf. It"),
        ([1.0, math.nan], "returned nan for sample 1. It"),
        ([1.0, -math.inf], "returned -inf for sample 1. It"),
        ([1.0], "returned 1 figures for 2 samples. It"),
        (torch.zeros(3), "returned 3 figures for 2 samples. It"),
        ([], "returned 0 figures for 2 samples. It"),
        (None, "returned None, which is no number. It"),
        ("0.5", "returned '0.5', which is no number. It"),
        ({"map": 0.5}, "returned {'map': 0.5}, which is no number. It"),
        (1j, "returned 1j, which is no number. It"),
        ([0.5, [0.5]], "returned [0.5] for sample 1, which is no number. It"),
        (torch.zeros(2, 1), "returned [0.0] for sample 0, which is no number. It"),
    ],
)
def test_what_is_no_figure_is_repeated(returned: Any, words: str) -> None:
    def accuracy(outputs: Any) -> Any:  # noqa: ARG001
        return returned

    with pytest.raises(QgateError) as error:
        figures(accuracy)
    assert str(error.value).startswith(f"metric accuracy of tiny, mode int8, {words}")
    assert str(error.value).endswith("with one for each of the 2 samples.")


def test_a_metric_that_raises_is_one_error_with_its_words() -> None:
    def accuracy(outputs: Any) -> float:
        return float(outputs[7])

    with pytest.raises(QgateError, match="metric accuracy of tiny, mode int8, raised IndexError: "):
        figures(accuracy)


def test_a_metric_may_write_into_what_it_gets() -> None:
    def careless(outputs: Any, reference: Any, inputs: Any) -> float:
        outputs[0].sub_(reference[0])
        inputs[0]["x"].zero_()
        inputs.clear()
        return float(outputs[0])

    assert figures(careless) == figures(careless) == TaskFigures(-0.5)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda outputs, labels: 0, "asks for 'labels', which there is not"),  # noqa: ARG005
        (lambda output: 0, "asks for 'output', which there is not"),  # noqa: ARG005
        (lambda reference: 0, "does not ask for `outputs`"),  # noqa: ARG005
        (lambda: 0, "does not ask for `outputs`"),
        ("accuracy", "'accuracy' of tiny is str: give a callable"),
        (0.5, "0.5 of tiny is float: give a callable"),
        (dict, "metric dict of tiny does not say what its parameters are"),
    ],
)
def test_a_metric_that_asks_for_something_else_is_refused_with_the_model(
    metric: Any, words: str
) -> None:
    with pytest.raises(QgateError) as error:
        model(metric)
    assert words in str(error.value)


def test_the_names_it_may_ask_for_are_listed() -> None:
    def accuracy(outputs: Any, labels: Any) -> float:
        return float(outputs[0] == labels[0])

    with pytest.raises(QgateError) as error:
        model(accuracy)
    assert str(error.value) == (
        "metric accuracy of tiny asks for 'labels', which there is not: its parameters are among "
        "outputs, reference, inputs; others need a default."
    )


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (everything, "everything"),
        (functools.partial(with_default, top=1), "with_default"),
        (Accuracy(), "Accuracy"),
        (Accuracy().__call__, "__call__"),
        (lambda outputs: 0, "metric"),  # noqa: ARG005
    ],
)
def test_results_call_it_by_its_name(metric: Any, name: str) -> None:
    assert metric_name(metric) == name


def test_a_model_of_another_module_keeps_its_metric() -> None:
    of = model(everything)
    assert of.with_module(nn.Linear(2, 2)).metric is everything


def test_the_first_floating_output_is_the_one_it_gets() -> None:
    class Ranking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.fc(x)
            return {"order": scores.argsort(-1), "scores": scores}

    of = qgate.Model(Ranking(), [torch.ones(1, 2)], "ranking", metric=anything)
    assert torch.equal(of(of.inputs[0]), of.module(of.inputs[0])["scores"])
