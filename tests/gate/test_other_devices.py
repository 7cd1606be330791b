"""Accepted errors of other devices: which limit holds for each metric, and the room of a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from qgate.errors import QgateError
from qgate.gate import Limits, Measured
from qgate.gate.checks import Verdict, judge
from qgate.gate.ledger import with_accepted
from qgate.gate.texts import failure_text, sentence

CPU, CPU_2, CUDA = "cpu-avx512-0badcafe", "cpu-avx2-01234567", "cuda-sm_90-deadbeef"
ACCEPTED = {"relative_mse": 1e-3, "one_minus_correlation": 2e-3}
ROW = Measured(
    site="layers.0:weight", layer="layers.0", scope="backward",
    values={"relative_mse": 1.04e-3, "one_minus_correlation": 2.08e-3}, order=0, nonfinite=0,
)  # fmt: skip


def verdict(row: Measured, elsewhere: Mapping[str, str], kind: str = "cuda") -> Verdict:
    return judge([with_accepted(row, ACCEPTED, elsewhere, kind)], lambda _: Limits())


def test_each_metric_has_the_limit_of_the_device_that_accepted_it() -> None:
    devices = dict.fromkeys(ACCEPTED, CPU)
    assert verdict(ROW, devices).passed
    for metric in ACCEPTED:
        (failure,) = verdict(ROW, {metric: CPU}).failed
        assert {failure.metric, metric} == {*ACCEPTED}
        assert (failure.accepted_on, failure.allowed) == ("", 0.02)
    assert len(verdict(ROW, {}).failed) == 2


def test_a_failure_names_the_device_that_accepted_the_value() -> None:
    row = replace(ROW, values={"relative_mse": 1.08e-3, "one_minus_correlation": 2e-3})
    judged = verdict(row, {"relative_mse": CPU})
    (failure,) = judged.failed
    assert sentence(failure) == (
        f"relative_mse 1.08e-03 > 1.05e-03, 8 % over accepted, 5 % allowed (accepted on {CPU})"
    )
    assert f"(accepted on {CPU})" in failure_text(judged, "fp16").partition("\n")[0]
    assert "accepted on" not in sentence(verdict(row, {}).failed[0])


def test_the_room_of_a_device_is_added_beside_values_of_another_kind() -> None:
    row = replace(
        ROW,
        values={"relative_mse": 9e-3, "one_minus_correlation": 2e-3},
        device_room={"relative_mse": 8e-3},
    )
    assert verdict(row, {"relative_mse": CPU}).passed
    for elsewhere, kind in (({}, "cuda"), ({"relative_mse": CPU_2}, "cpu")):
        (failure,) = verdict(row, elsewhere, kind).failed
        assert (failure.metric, failure.room) == ("relative_mse", 0.0)
    worse = replace(row, values={"relative_mse": 9.1e-3, "one_minus_correlation": 2e-3})
    (failure,) = verdict(worse, {"relative_mse": CPU}).failed
    assert failure.bound == pytest.approx(1.05e-3 + 8e-3)
    assert failure.room == 8e-3
    assert sentence(failure).endswith(
        f"(accepted on {CPU}; another right arithmetic may add 8.0e-03)"
    )


@pytest.mark.parametrize("room", [math.nan, math.inf, -1e-9])
def test_a_room_is_finite_and_not_negative(room: float) -> None:
    with pytest.raises(QgateError, match=r"device_room .* of relative_mse at layers.0:weight"):
        replace(ROW, device_room={"relative_mse": room})


def test_an_absent_site_names_the_device_whose_update_removes_it() -> None:
    absent = {("layers.9:output", "local"): ""}
    judgement = judge(
        [], lambda _: Limits(), absent=absent, kept_on={("layers.9:output", "local"): CPU}
    )
    (failure,) = judgement.failed
    assert f"only an update on {CPU} removes them" in sentence(failure)
