"""The task is judged sample by sample: what moves one of them, or all, is red on either side."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.baselines.accepted import read_accepted
from qgate.engines.compute import token_values
from qgate.engines.scored import Pair
from qgate.gate import Measured
from qgate.gate.checks import NO_SAMPLES, Check, checks_of, judge, paired_change
from qgate.gate.ledger import Which, decide_update, with_accepted
from qgate.gate.measuring import tasks
from qgate.gate.policy import Limits
from qgate.metrics import METRICS, sample_part
from tests.gate.benches import LLAMA, SHORT, mode_of, session
from tests.shares import share

ACCEPTED = [1.0 + 0.02 * number for number in range(10)]
EIGHT = replace(SHORT, samples=8)


def measured(bits: Sequence[float], accepted: Sequence[float] | None = ACCEPTED) -> Measured:
    mean = sum(bits) / len(bits)
    values = {"bits_per_byte": mean, "kl_divergence": 0.01, "next_token_accuracy": 0.7}
    parts = {sample_part(n): {"bits_per_byte": figure} for n, figure in enumerate(bits)}
    row = Measured(
        site="logits", layer="", scope="task", values=values, order=0, nonfinite=0, parts=parts
    )
    if accepted is None:
        return row
    entries = {f"bits_per_byte@sample_{n}": figure for n, figure in enumerate(accepted)}
    entries |= values | {"bits_per_byte": sum(accepted) / len(accepted)}
    return with_accepted(row, entries)


def moved(changes: dict[int, float], accepted: Sequence[float] = ACCEPTED) -> list[float]:
    return [figure + changes.get(number, 0.0) for number, figure in enumerate(accepted)]


def change_of(row: Measured, *, same: bool = True, limits: Limits | None = None) -> Check:
    checks = checks_of(row, limits or Limits(), same)
    (check,) = [check for check in checks if check.metric == "task_change"]
    return check


FAULTS = {
    "one much worse, one much better": ({3: 0.1, 7: -0.1}, "most moved: sample 3 by +0.1, 7 by"),
    "one much worse": ({3: 0.06}, "most moved: sample 3 by +0.06"),
    "all better by a lot": (dict.fromkeys(range(10), -0.05), "-0.05 in the mean of 10 samples"),
    "all a little worse": (dict.fromkeys(range(10), 0.006), "+0.006 in the mean of 10 samples"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_moves_samples_is_red_and_names_them(fault: str) -> None:
    changes, words = FAULTS[fault]
    check = change_of(measured(moved(changes)))
    assert not check.passed
    assert check.kind == "regression"
    assert words in check.reason
    assert check.times is not None
    assert check.times > 1


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_it_works_with_few_samples(count: int) -> None:
    accepted = ACCEPTED[:count]
    same = change_of(measured(accepted, accepted))
    assert (same.passed, same.value) == (True, 0.0)
    noise = moved({n: 2e-4 * (-1) ** n for n in range(count)}, accepted)
    assert change_of(measured(noise, accepted)).passed
    worse = moved(dict.fromkeys(range(count), 0.02), accepted)
    check = change_of(measured(worse, accepted))
    assert not check.passed
    assert ("one sample, which has no interval" in check.reason) is (count == 1)


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    before = {0: 1.0, 1: 1.1, 2: 1.3, 3: 0.9}
    change = paired_change(before, {0: 1.01, 1: 1.14, 2: 1.31, 3: 0.92})
    # scipy.stats.ttest_rel(now, before).confidence_interval(0.95)
    assert change.mean == pytest.approx(0.02)
    assert (change.low, change.high) == pytest.approx((-0.0025, 0.0425), abs=2e-4)
    assert [number for number, _ in change.changes] == [1, 3, 0, 2]


def test_two_samples_have_no_interval_wider_than_they_lie_apart() -> None:
    change = paired_change({0: 1.0, 1: 1.1}, {0: 1.001, 1: 1.099})
    assert (change.low, change.high) == pytest.approx((-0.002, 0.002))
    assert change_of(measured([1.001, 1.099], [1.0, 1.1])).passed
    assert not change_of(measured([1.03, 1.07], [1.0, 1.1])).passed


def test_a_margin_is_wider_on_other_arithmetic() -> None:
    row = measured(moved(dict.fromkeys(range(10), 0.01)))
    assert not change_of(row).passed
    assert change_of(row, same=False).passed
    assert not change_of(row, same=False, limits=Limits(task_margin_other_device=0.008)).passed
    assert change_of(row, limits=Limits(task_margin=0.01)).passed


def test_a_file_without_figures_of_samples_is_told_and_updated() -> None:
    older = measured(ACCEPTED, None)
    means = {name: value for name, value in older.values.items() if value is not None}
    verdict = judge([with_accepted(older, means)], lambda _row: Limits(), True)
    assert {check.metric for check in verdict.failed} == {
        f"bits_per_byte@sample_{number}" for number in range(10)
    }
    assert {(check.kind, check.reason) for check in verdict.failed} == {("missing", NO_SAMPLES)}
    for which in ("failed", "new", "all"):
        update = decide_update(verdict, which)
        assert update.passed
        written = {metric for _, _, metric in update.values}
        assert {f"bits_per_byte@sample_{number}" for number in range(10)} <= written


@pytest.mark.parametrize("which", ["failed", "new", "all"])
def test_a_change_is_accepted_with_all_samples(which: Which) -> None:
    bits = moved({3: 0.1, 7: -0.1})
    verdict = judge([measured(bits)], lambda _row: Limits(), True)
    update = decide_update(verdict, which)
    if which == "new":
        assert [check.metric for check in update.remaining] == ["task_change"]
        return
    assert update.passed
    samples = {name: value for (_, _, name), value in update.values.items() if "@" in name}
    assert samples == {f"bits_per_byte@sample_{n}": figure for n, figure in enumerate(bits)}
    assert not [name for _, _, name in update.values if name == "task_change"]


def test_a_sample_whose_line_was_removed_fails() -> None:
    row = measured(ACCEPTED)
    assert row.accepted is not None
    fewer = {name: value for name, value in row.accepted.items() if not name.endswith("_4")}
    failed = [
        check for check in checks_of(replace(row, accepted=fewer), Limits(), True)
        if not check.passed
    ]  # fmt: skip
    assert [(check.kind, check.metric) for check in failed] == [
        ("missing", "bits_per_byte@sample_4")
    ]
    assert "its line was removed" in failed[0].reason


def test_metrics_of_samples_are_those_of_the_whole() -> None:
    metric = METRICS.get("bits_per_byte@sample_12")
    assert (metric.base, metric.part, metric.direction) == ("bits_per_byte", "sample_12", "lower")
    assert metric.label == "Bits per Byte of sample 12"
    assert METRICS.find("bits_per_byte@sample_12") == metric
    assert "sample_12" not in {part.part for part in METRICS.parts_of("bits_per_byte")}


# A model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recorded")
    recording = session(folder, LLAMA, updating="all", sampling=EIGHT)
    for name in ("int8", "mxfp4"):
        assert recording.task("task", mode_of(recording.bench, name)).passed
    recording.commit()
    return folder


def test_the_accepted_file_has_a_figure_of_each_sample(recorded: Path) -> None:
    file = recorded / LLAMA / "accepted" / "int8.txt"
    accepted = read_accepted(file.read_bytes(), str(file)).values
    figures = [value for key, value in accepted.items() if "@sample_" in key.metric]
    assert len(figures) == 8
    whole = next(value for key, value in accepted.items() if key.metric == "bits_per_byte")
    assert sum(map(float, figures)) / 8 == pytest.approx(whole)


Rows = Callable[..., Iterator[Pair]]


def one_worse(means: Callable[..., tuple[float, ...]]) -> Callable[..., tuple[float, ...]]:
    """Make the third sample much worse, and the fourth much better."""
    count = iter(range(100))

    def figures(*rows: object) -> tuple[float, ...]:
        bits, *more = means(*rows)
        return (bits + {2: 0.3, 3: -0.25}.get(next(count), 0.0), *more)

    return figures


def shifted(rows: Rows) -> Rows:
    """Compare each logit with the token after the next."""
    return lambda ids, *others: rows(ids.roll(-1, 1), *others)


def better(rows: Rows) -> Rows:
    """Judge the reference in place of the mode."""
    return lambda ids, _actual, reference, first: rows(ids, reference, reference, first)


@share(3)
@pytest.mark.parametrize(
    ("mode", "name", "fault", "words"),
    [
        ("int8", "_means", one_worse, r"sample 2 by \+0.3, 3 by -0.25"),
        ("mxfp4", "_means", one_worse, r"sample 2 by \+0.3, 3 by -0.25"),
        ("int8", "_row_pairs", shifted, "in the mean of 8"),
        ("mxfp4", "_row_pairs", shifted, "in the mean of 8"),
        ("mxfp4", "_row_pairs", better, "^-"),
    ],
)
def test_faults_of_the_task_are_red(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, mode: str,
    name: str, fault: Callable[..., Any], words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(tasks, name, fault(getattr(tasks, name)))
    gated = session(recorded, LLAMA, sampling=EIGHT)
    outcome = gated.task("task", mode_of(gated.bench, mode))
    (check,) = [check for check in outcome.verdict.failed if check.metric == "task_change"]
    assert re.search(words, check.reason)


@pytest.mark.parametrize("mode", ["int8", "mxfp4"])
def test_what_was_recorded_passes(recorded: Path, mode: str) -> None:
    gated = session(recorded, LLAMA, sampling=EIGHT)
    outcome = gated.task("task", mode_of(gated.bench, mode))
    assert outcome.passed
    (check,) = [check for check in outcome.verdict.checks if check.metric == "task_change"]
    assert check.value == 0.0


def figures(ids: Tensor, actual: Tensor, reference: Tensor) -> tuple[float, ...]:
    return tasks._means(
        [token_values(*pair) for pair in tasks._row_pairs(ids, actual, reference, 0)]
    )


def test_tokens_of_all_rows_count_and_padding_does_not() -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (2, 9), generator=random)
    actual, reference = (torch.randn(2, 9, 16, generator=random) for _ in range(2))
    rows = [figures(ids[n : n + 1], actual[n : n + 1], reference[n : n + 1]) for n in range(2)]
    batch_figures = figures(ids, actual, reference)
    assert batch_figures == pytest.approx([sum(column) / 2 for column in zip(*rows, strict=True)])
    padded = ids.clone()
    padded[1] = -1
    assert figures(padded, actual, reference) == pytest.approx(rows[0])
    padded[0, 5:] = -1
    short = figures(ids[:1, :5], actual[:1, :5], reference[:1, :5])
    assert figures(padded, actual, reference) == pytest.approx(short)
    padded_ids = ids[:1].clone()
    padded_ids[0, :3] = -1
    behind = figures(ids[:1, 3:], actual[:1, 3:], reference[:1, 3:])
    assert figures(padded_ids, actual[:1], reference[:1]) == pytest.approx(behind)
    assert all(
        math.isnan(figure) for figure in figures(torch.full_like(ids, -1), actual, reference)
    )


@pytest.mark.parametrize(("tokens", "times"), [(0, 1), (5_120, 1), (1_280, 2), (100, 5)])
def test_a_margin_is_wider_for_few_tokens(tokens: int, times: float) -> None:
    row = dataclasses.replace(
        measured(moved(dict.fromkeys(range(10), 0.004 * times))), positions=(tokens,)
    )
    mean = sum(ACCEPTED) / len(ACCEPTED)
    assert change_of(row).bound == pytest.approx(0.005 * times * mean)
    assert change_of(row).passed
    assert change_of(dataclasses.replace(row, positions=(20_000,))).passed is (times == 1)
