"""Limits that are looser than the default are listed, and none is switched off without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgate.plugin.shipped import shipped_markers, standard_of
from tests.plugin.conftest import Run
from tests.plugin.projects import add, header, page


def test_shipped_suites_are_those_of_the_checkout() -> None:
    assert shipped_markers("test_overflow.py", "test_overflow") == (
        {"atol": 1e-4, "reason": "a share is a count of few elements"},
    )
    assert len(shipped_markers("test_dump_distributions.py", "test_dump_distributions")) == 2
    assert shipped_markers("test_mine.py", "test_mine") == ()
    changed = {"regression": 0, "atol": 3.0, "scopes": "backward", "reason": "mine"}
    standard = standard_of("test_dump_distributions.py", "test_dump_distributions", changed)
    assert standard is not None
    assert standard["atol"] == 2.0


def test_looser_limits_are_in_summary_header_and_page(project: Path, suites: Run) -> None:
    add(project, "test_activations.py")
    (project / "qgate.toml").write_text(
        "[limits]\nregression = 1.0\nreason = 'a new compiler'\n"
        "[[limits.rules]]\nsites = 'layers'\nbudget_db = 2.0\n"
    )
    result = suites("--layers", "first", "--update-baselines", "--update-which", "new")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "2 limits are looser than the default: regression 1 (50x, [[]limits] of qgate.toml: a "
            "new compiler); budget_db 2 (4x, rule 1 of [[]limits] of qgate.toml: no reason)"
        ]
    )
    looser = header(project)["looser"]
    limits = [limit["limit"] for limit in looser]
    elsewhere = "regression_other_device"
    assert limits == ["regression", "budget_db", "atol", elsewhere, elsewhere]
    assert [limit["shipped"] for limit in looser] == [False, False, True, True, True]
    assert looser[2]["source"] == "limits marker of test_activations in test_activations.py"
    assert [limit["modes"] for limit in looser[3:]] == [
        ["5-4", "5-6", "5-7"], ["state-*-feedback"],
    ]  # fmt: skip
    text = page(project)
    assert "2 set by this project, 3 by the suites of qgate" in text
    shipped = "tuning on other text moves it by up to 0.47 octaves"
    assert text.index("a new compiler") < text.index(shipped)
