"""The first line and the table: what a user reads."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.gate import Limits, Measured, Verdict, failure_text, first_line, judge, parse_bound
from qgate.results.failure_causes import EarlierCause
from tests.gate.making import ACCEPTED, carried, measured, verdict

SITE = "layers.2.mixer.in_proj:output"
OPEN = {"accepted": {"relative_mse": 3.395e-5, "one_minus_correlation": 5e-5}}
WIDE = {"relative_mse": 2e-4, "one_minus_correlation": 6e-5}
COMMAND = "pytest suites --mode 2-1 --update-baselines"


def absent() -> Verdict:
    return judge([], lambda _: Limits(), True, absent={(SITE, "local"): ""})


CASES: list[tuple[Verdict, str]] = [
    (verdict(carried(SITE, 9.211e-4, **OPEN)), f"relative_mse 9.2e-04 > 3.5e-05 at {SITE} (mode 2-1): 27.1x accepted"),
    (verdict(carried(SITE, 1.05e-4)), f"relative_mse 1.1e-04 > 1.0e-04 at {SITE} (mode 2-1): 5 % over accepted, 2 % allowed"),
    (verdict(carried(SITE, 1.0200001e-4)), f"relative_mse 1.0200001e-04 > 1.0200000e-04 at {SITE} (mode 2-1): 2.00001 % over accepted, 2 % allowed"),
    (verdict(carried(SITE, accepted={**ACCEPTED, "relative_mse": 0.0})), f"relative_mse 1.0e-04 > 1.0e-14 at {SITE} (mode 2-1): accepted is 0"),
    (verdict(measured(SITE, 1.549e-4, accepted=WIDE)), f"relative_mse 1.5e-04 > 1.1e-04 at {SITE} (mode 2-1): 1.9 dB over the ideal mxfp8_e4m3 quantizer, 0.5 allowed"),
    (verdict(measured(SITE, 1.1223e-4, accepted=WIDE)), f"relative_mse 1.1223e-04 > 1.1220e-04 at {SITE} (mode 2-1): 0.501 dB over the ideal mxfp8_e4m3 quantizer, 0.5 allowed"),
    (verdict(measured(SITE, ideal={"relative_mse": 0.0}, floor=1e-12)), f"relative_mse 1.0e-04 > 1.0e-12 at {SITE} (mode 2-1): the ideal mxfp8_e4m3 quantizer is exact here, only the noise floor is allowed"),
    (verdict(measured(SITE, ideal={"relative_mse": math.nan})), f"relative_mse 1.0e-04 at {SITE} (mode 2-1): the ideal quantizer's error is nan"),
    (verdict(carried(SITE, accepted={**ACCEPTED, "relative_mse": math.nan})), f"relative_mse 1.0e-04 at {SITE} (mode 2-1): the accepted value is nan"),
    (verdict(carried("lm_head", values={**ACCEPTED, "correlation": 0.941}), bound=parse_bound("correlation>0.98")), "correlation 0.941 < 0.98 at lm_head (mode 2-1): absolute limit"),
    (verdict(carried("lm_head", 0.5, accepted={**WIDE, "relative_mse": 0.9}), bound=parse_bound("relative_mse<0.25", reason="half is noise")), "relative_mse 0.5 > 0.25 at lm_head (mode 2-1): absolute limit, half is noise"),
    (verdict(carried(SITE, accepted={"relative_mse": 1e-4})), f"no accepted one_minus_correlation at {SITE} (mode 2-1), which other metrics of the site have: its line was removed, or never written: record it with --update-baselines"),
    (verdict(carried(SITE, accepted=None)), f"no accepted one_minus_correlation at {SITE} (mode 2-1): record it with --update-baselines"),
    (verdict(carried(SITE, nonfinite=3)), f"non-finite values at {SITE} (mode 2-1): 3 NaN or infinite in actual"),
    (verdict(carried(SITE, math.nan)), f"relative_mse is nan at {SITE} (mode 2-1): only a finite value can pass"),
    (verdict(carried(SITE, None)), f"relative_mse was not computed at {SITE} (mode 2-1): only a finite value can pass"),
    (absent(), f"not measured at {SITE} (mode 2-1): it has accepted errors, the set of sites changed"),
    (verdict(measured(SITE, ideal={"relative_mse": 0.0}, quantizer="", floor=1e-12)), f"relative_mse 1.0e-04 > 1.0e-12 at {SITE} (mode 2-1): the mode leaves it as it is, only float noise is allowed"),
    (verdict(carried(SITE, 4e-5)), f"relative_mse 4.0e-05 < 4.9e-05 at {SITE} (mode 2-1): 4.0 dB better than accepted: something else was computed, or accept it"),
    (verdict(carried(SITE, why={"nothing": "the gradient is zero"})), f"not in effect at {SITE} (mode 2-1): the gradient is zero"),
    (verdict(carried(SITE, gated=(), accepted=None)), f"nothing compared at {SITE} (mode 2-1): a gate that compared nothing does not pass"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "line"), CASES, ids=range(len(CASES)))
def test_the_first_line(found: Verdict, line: str) -> None:
    headline = first_line(found, "2-1")
    more_failures = len(found.failed) - 1
    assert headline == line + (f" (+{more_failures} more failed check)" if more_failures else "")


def test_a_verdict_that_passed_has_no_first_line() -> None:
    with pytest.raises(QgateError, match="mode 2-1 passed"):
        first_line(verdict(carried()), "2-1")


def test_the_label_can_be_another() -> None:
    assert "(format hif8)" in first_line(verdict(carried(mse=1.0)), "hif8", label="format")


def text(*sites: Measured, **given: Any) -> str:
    bound = given.pop("bound", None)
    return failure_text(
        verdict(*sites, bound=bound),
        "2-1",
        baseline="baselines/tiny/2-1.txt",
        command=COMMAND,
        report="qgate-out/report.html",
        **given,
    )


def test_the_whole_text() -> None:
    message = text(
        carried("fc2", 9.211e-4, order=1, **OPEN),
        measured("fc1", 1.2e-4, ideal=None),
        carried("good"),
    )
    assert message.splitlines() == [
        "relative_mse 1.2e-04 > 1.0e-04 at fc1 (mode 2-1): 20 % over accepted, 2 % allowed (+1 more failed check)",
        "",
        "  site  scope    metric        accepted/ideal  now       change  limit        kind",
        "  fc2   carried  relative_mse  3.4e-05         9.2e-04   27.1x   <= 3.5e-05   regression",
        "  fc1   local    relative_mse  1.00e-04        1.20e-04  +20 %   <= 1.02e-04  regression",
        "  the error enters at fc1, the first whose local error is out",
        "  baseline  baselines/tiny/2-1.txt",
        f"  if intended: {COMMAND}",
        "  report  qgate-out/report.html",
    ]


def test_columns_stand_under_each_other() -> None:
    table_lines = text(carried("a", 1.0), carried("a.much.longer.name", 0.5)).splitlines()[2:5]
    starts = [
        line.index(word)
        for line, word in zip(table_lines, ("scope", "carried", "carried"), strict=True)
    ]
    assert len(set(starts)) == 1


@pytest.mark.parametrize("count", [1, 4, 5, 6, 200])
def test_the_text_stays_under_fifteen_lines(count: int) -> None:
    sites = [measured(f"s{n}", 1.0 + n, order=n, ideal=None) for n in range(count - 1)]
    message = text(
        *sites, carried("abs", 0.5, accepted=WIDE), bound=parse_bound("relative_mse<0.25")
    )
    assert len(message.splitlines()) < 15
    bound = parse_bound("relative_mse<0.25")
    failed = len(verdict(*sites, carried("abs", 0.5, accepted=WIDE), bound=bound).failed)
    assert (f"5 of {failed} failed checks are shown" in message) == (failed > 5)


@pytest.mark.parametrize(
    ("site", "offered", "words"),
    [
        (carried(mse=2e-4), True, "if intended"),
        (carried(accepted=None), True, "to record it"),
        (carried(mse=2e-2), False, "change the limit (its suite)"),
        (measured(mse=1e-3, accepted=WIDE), False, "raise budget_db (default)"),
        (measured(mse=1e-3), False, "raise budget_db (default)"),
        (carried(nonfinite=1), False, "find what overflows"),
        (carried(mse=math.nan, accepted=None), False, "find what overflows"),
        (carried(gated=(), accepted=None), False, "give the site something to compare"),
    ],
)
def test_the_command_is_offered_only_where_it_helps(
    site: Measured, offered: bool, words: str
) -> None:
    bound = (
        parse_bound("relative_mse<1e-2") if site.scope == "carried" and site.gated is None else None
    )
    message = text(site, bound=bound)
    assert (COMMAND in message) == offered
    assert ("cannot accept this" in message) != offered
    assert words in message


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ([carried(mse=1.0), measured(mse=1.0)], "the error enters at layers.0:output"),
        ([carried(mse=1.0), measured()], "no local error is out"),
        ([carried(mse=1.0)], "local errors were not measured"),
    ],
)
def test_where_the_error_enters(sites: list[Measured], words: str) -> None:
    assert words in text(*sites)


def test_budget_rows_show_decibels() -> None:
    row = text(measured("fc1", 1.549e-4, accepted=WIDE)).splitlines()[3].split()
    assert " ".join(row) == "fc1 local relative_mse 1.0e-04 1.5e-04 1.9 dB <= 1.1e-04 budget"


def test_a_hostile_name_is_one_line_without_control_characters() -> None:
    name = "bad\n::error::x\x1b[31m\u202e"
    message = text(carried(name, 1.0))
    assert all(char.isprintable() or char == "\n" for char in message)
    assert not any(line.startswith("::") for line in message.splitlines())
    assert r"bad\n::error::x\x1b[31m\u202e" in message.splitlines()[0]


def test_what_differs_looks_different() -> None:
    """Accepted, now and limit of a small regression were all 1.6e-03."""
    message = text(carried("fc", 1.6329e-3, accepted={**ACCEPTED, "relative_mse": 1.6001e-3}))
    (row,) = (line.split() for line in message.splitlines() if line.startswith("  fc "))
    accepted, now, _, _, limit = row[3:8]
    assert len({accepted, now, limit}) == 3, row


def test_a_failure_praises_nothing_and_gives_one_advice() -> None:
    values = {**ACCEPTED, "mse": 1e-9, "correlation": 0.999999}
    message = text(
        carried("a", values={**values, "relative_mse": 0.5}), measured("b", 1.0, accepted=WIDE)
    )
    assert not {"excellent", "good", "fair", "poor"} & set(message.replace(",", " ").split())
    assert "  carried: MSE 1.0e-09, correlation 0.999999" in message
    assert message.count("--update-baselines") == 1
    assert "if intended" not in message


def test_a_failure_that_follows_says_what_to_mend_first() -> None:
    earlier = EarlierCause("follows from layers.3.up:weight", is_acceptable=False)
    message = text(carried("fc2", 1.0), earlier=earlier)
    assert message.splitlines()[0].endswith("; follows from layers.3.up:weight")
    assert "  mend that first: this test follows from layers.3.up:weight" in message
    assert "if intended" not in message
    drift = text(carried("fc2", 1.0), earlier=earlier._replace(is_acceptable=True))
    assert "if intended" in drift
    assert "mend that first" not in drift


def off_ideal(decibels: float) -> Verdict:
    mse = 1e-3 * 10 ** (decibels / 10)
    ideal = {"relative_mse": 1e-3}
    return verdict(measured(mse=mse, ideal=ideal, quantizer="int8", accepted=None, gated=()))


@pytest.mark.parametrize(
    ("decibels", "passes"),
    [(-60, False), (-0.51, False), (-0.49, True), (0.49, True), (0.51, False)],
)
def test_an_error_that_no_quantizer_of_the_format_can_make_is_no_improvement(
    decibels: float, passes: bool
) -> None:
    judgement = off_ideal(decibels)
    assert judgement.passed is passes
    if decibels < 0 and not passes:
        words = "better than an ideal int8 quantizer: nothing is quantized here"
        assert words in first_line(judgement, "int8")


def test_a_larger_budget_is_advised_only_where_it_helps() -> None:
    above, below = (failure_text(off_ideal(decibels), "int8") for decibels in (6.66, -6.66))
    assert "raise budget_db" in above
    assert "raise budget_db" not in below
    assert "fix the quantizer, or correct what the mode stands for" in below


@pytest.mark.parametrize(("decibels", "shown"), [(-6.66, "-6.7"), (-0.52, "-0.52"), (6.66, "6.7")])
def test_the_row_says_how_far_from_the_ideal_it_is(decibels: float, shown: str) -> None:
    assert f"  {shown} dB  " in failure_text(off_ideal(decibels), "int8").splitlines()[3]
