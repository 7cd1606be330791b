"""Figures of a task against scipy and plain numpy in float64, faults in them, and MLPerf's margins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from qgate.engines import compute
from qgate.engines.compute import figures_of, token_values
from qgate.engines.record import TokenFigures
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.checks import checks_of
from qgate.gate.measuring import tasks
from qgate.gate.policy import Limits, parse_bound
from qgate.metrics import intervals
from qgate.metrics.intervals import GroupedMean, grouped_mean
from qgate.models.task_metric import TaskFigures
from qgate.results.run_facts import (
    TASK_HEADS,
    TaskSummary,
    add_tasks,
    kept_text,
    margin_text,
    task_cells,
    task_texts,
)
from tests.gate.making import measured

SAMPLES, TOKENS, VOCABULARY = 6, 80, 12


@dataclass(frozen=True)
class Logits:
    ids: Tensor
    actual: Tensor
    reference: Tensor


@pytest.fixture(scope="module")
def logits() -> Logits:
    """Logits that predict the ids well, those of the mode with an error that differs by sample."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=draw)
    right = torch.nn.functional.one_hot(ids.roll(-1, 1), VOCABULARY)
    reference = 2 * right + 1.5 * torch.randn(SAMPLES, TOKENS, VOCABULARY, generator=draw)
    size = torch.linspace(0.2, 0.9, SAMPLES)[:, None, None]
    noise = size * torch.randn(reference.shape, generator=draw)
    return Logits(ids, reference + noise - 0.3 * right, reference)


def figures(of: Logits) -> TokenFigures:
    pairs = [*tasks._row_pairs(of.ids, of.actual, of.reference, 0)]
    return figures_of(pairs, [token_values(*pair) for pair in pairs])


def error_of(ratio: Callable[[list[int]], float]) -> float:
    """The standard error of a ratio by its influence of each sample, with numeric derivatives."""
    step = 1e-5
    weights = np.ones(SAMPLES)
    influence = []
    for sample in range(SAMPLES):
        moved = weights.copy()
        moved[sample] += step
        influence.append((ratio(moved) - ratio(weights)) / step)  # type: ignore[arg-type]
    return math.sqrt(np.square(influence).sum() * SAMPLES / (SAMPLES - 1))


def oracle(of: Logits) -> dict[str, float]:
    p, q = (
        np.exp(x - np.logaddexp.reduce(x, -1, keepdims=True))
        for x in (t[:, :-1].double().numpy() for t in (of.reference, of.actual))
    )
    ids = of.ids[:, 1:].numpy()
    kl = stats.entropy(p, q, axis=-1)
    of_token = [np.take_along_axis(x, ids[..., None], -1)[..., 0] for x in (p, q)]
    best_p, best_q = p.argmax(-1), q.argmax(-1)
    in_p, in_q = best_p == ids, best_q == ids
    change = np.log(of_token[1]) - np.log(of_token[0])
    t = stats.t.ppf(0.975, SAMPLES - 1)

    def kept(weights: Any) -> float:
        return float((in_q.sum(1) * weights).sum() / (in_p.sum(1) * weights).sum())

    return {
        "kl": kl.mean(),
        "kl_error": stats.sem(kl.mean(1)),
        "q99": np.percentile(kl.ravel(), 99),
        "q999": np.percentile(kl.ravel(), 99.9),
        "flips": (best_p != best_q).mean(),
        "lost": (in_p & ~in_q).mean(),
        "gained": (~in_p & in_q).mean(),
        "perplexity_ratio": np.exp(-np.log(of_token[1]).mean() + np.log(of_token[0]).mean()),
        "kept": in_q.sum() / in_p.sum(),
        "kept_half": t * error_of(kept),
        "detectable": (t + stats.t.ppf(0.8, SAMPLES - 1)) * stats.sem(change.mean(1)),
    }


def hold(of: Logits) -> None:
    """Hold every figure at the oracle's; the table of t has three digits."""
    expected, now = oracle(of), figures(of)
    assert now.kl is not None
    assert now.kl_spread is not None
    assert now.flips is not None
    assert now.lost is not None
    assert now.gained is not None
    assert now.kept is not None
    exact = {
        "kl": now.kl.mean, "kl_error": now.kl.standard_error, "q99": now.kl_spread.q99,
        "q999": now.kl_spread.q999, "flips": now.flips.mean, "lost": now.lost.mean,
        "gained": now.gained.mean, "perplexity_ratio": now.perplexity_ratio, "kept": now.kept.mean,
    }  # fmt: skip
    for name, value in exact.items():
        assert value == pytest.approx(expected[name], rel=1e-9), name
    assert now.kept.half_interval == pytest.approx(expected["kept_half"], rel=5e-3)
    assert now.difference.detectable == pytest.approx(expected["detectable"], rel=5e-3)


def test_figures_are_those_of_scipy_and_numpy(logits: Logits) -> None:
    hold(logits)
    expected = oracle(logits)
    assert expected["lost"] > expected["gained"] > 0.02, "both ways are there to be told apart"
    assert 0 < expected["kl"] < expected["q99"] < expected["q999"]


def _one_way(right: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *arguments: (of := right(*arguments)) | {"gained": of["lost"]}


def _of_samples(spread: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: spread(values.reshape(SAMPLES, -1).mean(1))


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "arguments of the KL swapped": (compute, "_kl", lambda kl: lambda r, a: kl(a, r)),
    "KL without a token's own weight": (compute, "_kl", lambda kl: lambda r, a: kl(r, a) / 2),
    "quantiles over samples": (compute, "_spread", _of_samples),
    "flips counted one way": (compute, "_right_tokens", _one_way),
    "lost and gained swapped": (
        compute, "_right_tokens", lambda right: lambda a, r, *more: right(r, a, *more),
    ),
    "tokens taken for independent": (
        compute, "groups_of", lambda _: lambda sample, _position: np.arange(len(sample)),
    ),
    "perplexity the wrong way round": (compute, "_exp", lambda _: lambda value: math.exp(-value)),
    "kept of all tokens": (
        compute, "_estimate", lambda estimate: lambda values, groups, _over=None: estimate(values, groups),
    ),
    "no room for the power": (intervals, "_T80", lambda _: dict.fromkeys(intervals._T80, 0.0)),
    "flips of the token drawn": (
        compute, "_same", lambda same: lambda a, b: same(a, b) if (b >= 0).all() else 1 - same(a, b),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_figures_are_seen(
    logits: Logits, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    module, name, plant = FAULTS[fault]
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    with pytest.raises(AssertionError):
        hold(logits)


@pytest.mark.parametrize("groups", [4, 6, 10, 40])
def test_a_detectable_change_is_seen_in_four_of_five_runs(groups: int) -> None:
    """The power of the paired t-test there, from the noncentral t distribution."""
    of = grouped_mean(np.random.default_rng(1).normal(size=groups).tolist(), [1] * groups)
    shift = of.detectable / of.standard_error
    critical = of.half_interval / of.standard_error
    power = stats.nct.sf(critical, groups - 1, shift)
    assert 0.74 < power < 0.86


def test_one_group_has_no_error() -> None:
    alone = grouped_mean([2.0], [4])
    assert (alone.mean, alone.standard_error, alone.half_interval) == (0.5, math.inf, math.inf)
    assert GroupedMean(0.0, 0.0, 9).detectable == 0


# Margins ------------------------------------------------------------------------------------------


def summary(**fields: Any) -> TaskSummary:
    plain = {
        "model": "m", "mode": "int8", "reference": "fp32", "metric": "", "samples": 10, "tokens": 90,
    }  # fmt: skip
    return TaskSummary(**(plain | fields))  # type: ignore[typeddict-item]


MARGINS = [
    ("mlperf-99", 0.995, 0.991, True),
    ("mlperf-99", 0.995, 0.989, False),
    ("mlperf-99.9", 1.0, 0.9995, True),
    ("mlperf-99.9", 1.0, 0.998, False),
]


@pytest.mark.parametrize(("name", "kept", "low", "passes"), MARGINS)
def test_a_margin_holds_the_lower_end_of_the_interval(
    name: str, kept: float, low: float, passes: bool
) -> None:
    of = summary(kept=kept, kept_low=low, kept_detectable=0.004, lost=0.03, gained=0.02)
    row = measured(
        site="logits", scope="task", values={"accuracy_kept": low}, gated=(), accepted=None,
        why={"accuracy_kept": kept_text(of)},
    )  # fmt: skip
    (check,) = checks_of(row, Limits(absolute={"accuracy_kept": parse_bound(name)}), True)
    assert check.passed is passes
    assert check.kind == "absolute"
    assert "10 samples tell changes from 0.4 % on" in check.reason
    assert "blind to 2 % that cancel" in check.reason
    words = {True: f"{name.removeprefix('mlperf-')} % kept", False: "% not shown"}
    assert words[passes] in margin_text(of)


def test_a_margin_that_was_not_computed_fails() -> None:
    row = measured(site="logits", scope="task", values={}, gated=(), accepted=None)
    limits = Policy.from_table({"absolute": ["mlperf-99"]}).limits_for("logits", scope="task")
    (check,) = checks_of(row, limits, True)
    assert not check.passed
    with pytest.raises(QgateError, match="mlperf-98"):
        parse_bound("mlperf-98")


def _summarized(samples: list[float], expected: list[float]) -> TaskSummary:
    of = summary(metric="accuracy")
    tasks._summarize_metric(
        of,
        TaskFigures(sum(samples) / len(samples), tuple(samples)),
        TaskFigures(sum(expected) / len(expected), tuple(expected)),
    )
    return of


def test_an_own_metric_keeps_a_share_of_its_reference() -> None:
    now, was = [0.7, 0.9, 0.8, 0.6, 0.9], [0.8, 0.9, 0.8, 0.7, 0.9]
    of = _summarized(now, was)
    assert of["kept"] == pytest.approx(3.9 / 4.1)
    assert of["kept_low"] < of["kept"]
    change = np.subtract(now, was)
    expected = (stats.t.ppf(0.975, 4) + stats.t.ppf(0.8, 4)) * stats.sem(change)
    assert of["detectable"] == pytest.approx(expected, rel=5e-3)
    assert "kept" not in _summarized([0.0, 0.1], [0.0, 0.0]), "a share of nothing"
    one = summary(metric="accuracy")
    tasks._summarize_metric(one, TaskFigures(0.95), TaskFigures(1.0))
    assert one["kept_low"] == 0.95
    assert "without an interval" in kept_text(one)


def _lines() -> Iterator[TaskSummary]:
    yield summary(
        detectable=0.02, kl=3e-3, kl_error=9e-5, kl_q99=0.036, kl_q999=0.084, flips=0.041,
        lost=0.0094, gained=0.0067, perplexity_ratio=1.002, kept=0.996, kept_low=0.9931,
        kept_detectable=0.004,
    )  # fmt: skip
    yield summary(mode="mxfp4", detectable=0.1, kept=0.9, kept_low=0.88, kept_detectable=0.018)
    yield from (summary(mode=mode) for mode in ("a", "b"))


def test_what_samples_can_tell_comes_first() -> None:
    first, *more = task_texts({"tasks": [*_lines()]})
    assert first == (
        "task of m, 10 samples, 90 tokens: a change of 0.02 to 0.1 bits per byte, or of 0.4 % to "
        "1.8 % of fp32's accuracy, would show"
    )
    poor_tasks = [{**task, "kept_detectable": 0.0} for task in _lines()]
    text = task_texts({"tasks": poor_tasks})[0]
    assert text.endswith("a change of 0.02 to 0.1 bits per byte would show"), "0 % says nothing"
    assert more[0] == (
        "int8: KL 0.003 ± 9e-5 nats (99 % 0.036, 99.9 % 0.084), another first token at 4.1 %, right "
        "ones 0.94 % lost and 0.67 % gained, perplexity x 1.002, 99.6 % of fp32's accuracy (MLPerf "
        "99 % kept, 99.9 % not kept; blind to 0.67 % that cancel)"
    )
    assert more[1] == "mxfp4: 90 % of fp32's accuracy (MLPerf 99 % not kept, 99.9 % not kept)"
    assert more[-1] == "+1 more modes in the report"
    assert task_texts({"tasks": [*_lines()], "shard": {"number": 1}}) == []
    assert task_texts({}) == []
    assert "too few samples" in task_texts({"tasks": [summary(samples=1)]})[0]
    assert all(len(task_cells(task)) == len(TASK_HEADS) for task in _lines())


def test_parts_of_a_run_are_joined_by_model_and_mode() -> None:
    one, other, *_ = _lines()
    assert add_tasks([one], [one, other]) == [one, other]
