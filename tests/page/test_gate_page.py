"""The page of gates as text: what it says first, what it escapes, what it leaves out and says so."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from qgate.charts.pages import margin_step
from qgate.charts.palette import HEAT_DARK, HEAT_LIGHT
from qgate.gate.checks import Check
from qgate.page import _gates
from qgate.page._gates import headline, view_texts
from qgate.page.pages import HtmlSection, page, summary_head
from qgate.page.runs import Run, run_of_records
from qgate.results.checks import view_of
from qgate.results.files import line
from tests.page.gate_records import (
    HOSTILE,
    KINDS,
    hostile_run,
    made_header,
    made_records,
    made_run,
    with_finding,
)


class Reader(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def first_line(html: str) -> str:
    heading = re.search(r"<h1>(.*?)</h1>", html)
    assert heading
    return re.sub(r"<[^>]+>", "", heading[1])


def first_lines(html: str) -> str:
    """The headline and the figures below it."""
    figures = re.search(r"</h1>\s*<p>(.*?)</p>", html)
    return f"{first_line(html)}: {figures[1]}" if figures else first_line(html)


def empty_run(**header: object) -> Run:
    return run_of_records(made_header(**header), [])  # type: ignore[arg-type]


# The first line -----------------------------------------------------------------------------------


def test_the_first_line_says_what_broke_and_how_much() -> None:
    html = page(made_run(120, failing=1), plots="none")
    assert first_line(html) == (
        "1 of 120 gates failed, 1 fault in 2-1 (green: fp8_e4m3, hif8 and 5 more): backbone.layers.0.mixer.in_proj:output (tiny-mamba, mode 2-1) is "
        "not what correct mxfp8_e4m3 per 32 gives"
    )
    assert first_lines(html).removeprefix(first_line(html)) == (
        ": relative_mse 2.2e-05 &gt; 9.2e-07, 14.3 dB over "
        "the ideal mxfp8_e4m3 per 32 quantizer, 0.5 allowed"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_failure_has_its_sentence(kind: str) -> None:
    failed = [json.loads(line(r)) for r in made_records(120, failing=6) if not r["passed"]]
    run = run_of_records(made_header(), [failed[KINDS.index(kind)]])
    html = page(run, plots="none")
    words = {
        "budget": "dB over the ideal",
        "regression": "accepted",
        "absolute": "absolute limit, the next layer overflows",
        "nonfinite": "non-finite values",
        "missing": "no accepted relative_mse",
        "absent": "not measured",
    }
    assert words[kind] in first_lines(html)
    can = kind in ("regression", "missing", "absent")
    assert ("if intended" in html) is can
    assert ("cannot accept this" in html) is not can


def test_a_number_that_json_cannot_hold_is_named() -> None:
    record = next(r for r in made_records(1, failing=1))
    record["checks"] = [{**record["checks"][0], "value": float("nan"), "times": float("inf")}]
    run = run_of_records(made_header(), [json.loads(line(with_finding(record)))])
    assert "relative_mse is nan, only a finite value can pass" in first_lines(page(run))


@pytest.mark.parametrize(
    ("run", "first"),
    [
        (empty_run(), "No gate ran, and nothing was compared"),
        (
            empty_run(broken={"t.py::test_a": "QgateError: no calibration\nmore"}),
            "No verdict for one gate, its set-up failed: QgateError: no calibration (t.py::test_a)",
        ),
        (empty_run(errors=["the disk is full"]), "The run failed: the disk is full"),
    ],
    ids=["empty", "broken", "errors"],
)
def test_what_has_no_verdict_is_not_green(run: Run, first: str) -> None:
    html = page(run)
    assert first_line(html) == first
    assert "<h1><span class='fail'>" in html or "<h1><span class='warn'>" in html
    assert "class='qgate-head passed'" not in html
    assert "class='good'" not in html


def test_a_run_that_passed_and_one_with_a_single_gate() -> None:
    html = page(made_run(120, failing=0), plots="none")
    assert first_line(html) == "120 gates passed"
    assert "<h1><span class='good'>" in html
    assert 'id="failing"' not in html
    assert first_line(page(made_run(1, failing=0))) == "1 gate passed"


def test_a_gate_that_passed_and_then_broke_is_not_green() -> None:
    run = made_run(3, failing=0)
    node = run.gates[0].node
    html = page(run_of_records({**run.header, "broken": {node: "teardown"}},
                               made_records(3, failing=0)))  # fmt: skip
    assert "<tr id=gate-1 class=u" in html
    assert html.count("<td>no verdict") == 1


def test_a_run_without_models_and_with_records_of_nothing() -> None:
    bare = {"suite": "", "node": "n", "model": "", "mode": "", "layer": "", "site": "", "scope": "",
            "values": {}, "ideal": {}, "accepted": {}, "checks": [], "passed": False,
            "seconds": 0}  # fmt: skip
    run = run_of_records(made_header(()), [bare])
    assert first_line(page(run)).startswith("1 of 1 gate")
    assert "a gate that compared nothing does not pass" in page(run)


# What it has --------------------------------------------------------------------------------------


def test_the_head_has_what_was_run_with_what() -> None:
    head = summary_head(made_run(120))
    for text in ("tiny-mamba", "cpu", "torch 2.13.0+cpu", "37826b17608f", "pytest suites --mode",
                 "<b>5</b> failed", "<b>1</b> new", "<b>114</b> passed",
                 "reference fp32"):  # fmt: skip
        assert text in head
    assert headline(made_run(120)).split(":")[0] in head
    part = summary_head(run_of_records(made_header(complete=False), []))
    assert "cut short" in part


def test_the_map_has_a_cell_for_every_place_linked_to_its_worst_gate() -> None:
    run = made_run(120)
    html = page(run, plots="none")
    cells = re.findall(r"<td class='([^']*)'><a href='#(gate-\d+)' title='([^']*)'>([^<]*)", html)
    assert len(cells) == 96
    bad = [cell for cell in cells if "bad" in cell[0]]
    assert {gate.anchor for gate in run.failed if not gate.is_new} == {cell[1] for cell in bad}
    assert all("failed" in cell[2] for cell in bad)
    assert all(re.fullmatch(r"−?\d+", cell[3]) for cell in cells)
    anchors = {tag.get("id") for _, tag in Reader(html).tags}
    assert {cell[1] for cell in cells} <= anchors


def test_columns_are_in_the_order_of_execution() -> None:
    html = page(made_run(240, layers=12), plots="none")
    heads = re.findall(r"<th scope='col' abbr='(layers\.\d+)'", html)
    assert heads == [f"layers.{number}" for number in range(12)]


def test_the_command_runs_the_gate_again_as_it_was_run() -> None:
    run = made_run(120, header=made_header(), failing=6)
    regression = next(
        gate for gate in run.failed if gate.check and gate.check["kind"] == "regression"
    )
    html = page(run, plots="none")
    block = html.partition(f"id='details-{regression.number}'")[2].partition("</details>")[0]
    block = unescape(block)
    command = f"pytest '{regression.node}' --mode '2-*'"
    assert f"<code>{command}</code>" in block
    assert f"<code>{command} --update-baselines</code>" in block
    assert f"<code>{regression.node}</code>" in block


def test_every_gate_has_a_row_and_every_id_is_unique() -> None:
    run = made_run(300, header=made_header(broken={"suites/test_task.py::test_task[x]": "no"}))
    html = page(run, sections=[HtmlSection("compared", "Compared <runs>", "<p>mine</p>")])
    ids = [tag["id"] for _, tag in Reader(html).tags if tag.get("id")]
    assert len(ids) == len(set(ids))
    assert {gate.anchor for gate in run.gates} <= set(ids)
    links = {str(tag["href"]) for tag in Reader(html).all("a")}
    filters = {link for link in links if link.startswith("#show&")}
    assert {link[1:] for link in links - filters if link.startswith("#")} <= set(ids)
    assert {"#show&verdict=failed", "#show&mode=2-1"} <= filters
    assert "<p>mine</p>" in html
    assert "Compared &lt;runs&gt;" in html
    assert html.count("class=u ") == 1


def test_models_have_a_column_only_where_there_are_several() -> None:
    one, two = made_run(24), made_run(300, models=("tiny-mamba", "tiny-llama"), layers=6)
    assert "name='model'" not in page(one, plots="none")
    html = page(two, plots="none")
    assert "name='model'" in html
    assert html.count("<table class='heat") == 2


def test_a_row_is_found_by_every_place_that_failed() -> None:
    first, *others_failed = (r for r in made_records(3, failing=1) if not r["passed"])
    assert not others_failed
    (check,) = (c for c in first["checks"] if not c["passed"])
    records = [first]
    for site in ("x_proj:weight", "dt_proj:weight"):
        other = {**check, "metric": "snr", "times": 1.1, "value": 1.1, "kind": "absolute"}
        records.append({**first, "site": f"layers.0.mixer.{site}", "checks": [other]})
    (row,) = (t for _, t in Reader(page(run_of_records(made_header(), records))).tags
              if "data-search" in t)  # fmt: skip
    assert row["data-search"] == "layers.0.mixer.|x_proj:weight|dt_proj:weight|snr"


def made_check(**changes: Any) -> Check:
    fields: dict[str, Any] = {
        "site": "fc1", "layer": "fc1", "scope": "local", "order": 0, "metric": "relative_mse",
        "value": 1e-14, "bound": 1e-9, "side": "<=", "passed": True, "kind": "budget",
        "against": 0.0, "allowed": 0.5, "times": 1e-5,
    }  # fmt: skip
    return Check(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "text", "key"),
    [
        ({"value": 0.0, "kind": "regression"}, "same", 1.0),
        ({}, "≈ same", 1.0),
        ({"value": 1e-3, "passed": False, "times": 1e6}, "from 0", math.inf),
        ({"value": 0.0, "against": 1e-3}, "to 0", 0.0),
    ],
)
def test_a_change_from_zero_is_one_only_where_there_is_one(
    changes: dict[str, Any], text: str, key: float
) -> None:
    view = view_texts(vars(made_check(**changes)))
    assert (view.change, view.moved) == (text, key)


@pytest.mark.parametrize(
    ("times", "figure"),
    [(1.00098, "1.001"), (1.0, "1"), (0.99999, "0.99999"), (1 + 1e-12, ">1"), (1 - 1e-12, "<1"),
     (1.004, "1.004"), (1.5, "1.5"), (26.61, "26.6"), (1346.2, "1346")],
)  # fmt: skip
def test_what_is_just_over_its_limit_is_said_to_be(times: float, figure: str) -> None:
    check = made_check(kind="budget", times=times)
    assert view_of(vars(check)).distance == f"{figure}x its limit (budget)"
    assert view_texts(vars(check)).far == f"{figure}×"


# Names --------------------------------------------------------------------------------------------


def test_names_are_text_wherever_they_are() -> None:
    html = page(hostile_run(), sections=[HtmlSection("<x>", HOSTILE[0], "")])
    reader = Reader(html)
    assert len(reader.all("script")) == 1
    assert not [a for a in reader.all("a") if not str(a["href"]).startswith("#")]
    assert not [name for _, tag in reader.tags for name in tag if name.startswith("on")]
    assert not [char for char in html if char != "\n" and not char.isprintable()]
    assert html.count("</style>") == 1
    assert html.count("</table>") == html.count("<table")


def test_it_needs_nothing_from_outside() -> None:
    html = page(made_run(60))
    reader = Reader(html)
    assert not [t for t, a in reader.tags if a.get("src") or t in ("link", "iframe", "object")]
    assert "url(" not in html
    assert "@import" not in html


# Plots and their budget ---------------------------------------------------------------------------


def plot_counts(html: str) -> tuple[int, int]:
    """Plots of failing gates and of passing ones."""
    before, _, after = html.partition("<section id='passing'>")
    return before.count("class='plot'") + before.count('class="plot"') - 1, after.count('"plot"')


@pytest.mark.parametrize(
    ("plots", "failing", "passing"),
    [("none", False, False), ("failed", True, False), ("worst", True, True), ("all", True, True)],
)
def test_only_plots_that_are_wanted_are_drawn(plots: str, failing: bool, passing: bool) -> None:
    html = page(made_run(40, failing=4), plots=plots)  # type: ignore[arg-type]
    bad, good = plot_counts(html)
    assert (bad > 0) is failing
    assert (good > 0) is passing
    few = plot_counts(page(made_run(40, failing=4)))[1]
    assert good > few if plots == "all" else good in (0, few)


def test_the_error_over_depth_is_made_of_numbers_and_always_there() -> None:
    html = page(made_run(40, failing=4), plots="none")
    assert "<figure class='growth'" in html
    assert "<div class='panels'>" not in html
    assert ".plot{" in html


def test_plots_beyond_the_budget_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gates, "PLOTS_BUDGET", 60_000)
    html = page(made_run(120, failing=30), plots="all")
    notes = html.count("Its plots were left out")
    assert 20 < notes <= 30
    assert len(html.encode()) < 350_000


def test_with_thousands_of_failures_the_page_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gates, "DETAILS_BUDGET", 20_000)
    run = made_run(200, failing=200, pictures=False)
    html = page(run)
    blocks = html.count("<details class='gate")
    assert 5 < blocks < 40
    assert f"{200 - blocks} more failing gates are in the table" in html
    assert html.count("<tr id=gate-") == 200
    linked = set(re.findall(r"href='#details-(\d+)'", html))
    assert linked == set(re.findall(r"id='details-(\d+)'", html))


def test_a_plot_that_cannot_be_drawn_costs_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_record: object) -> None:
        raise ZeroDivisionError("of <nothing>")

    monkeypatch.setattr(_gates, "panels_of", fails)
    html = page(made_run(12, failing=2))
    assert "could not be drawn" in html or "Not drawn: " in html
    assert "ZeroDivisionError: of &lt;nothing&gt;" in html


def test_without_plots_nothing_that_draws_is_loaded() -> None:
    code = (
        "import sys; from tests.page.gate_records import made_run\n"
        "from qgate.page.pages import page; page(made_run(12), plots='none')\n"
        "print([m for m in ('torch', 'matplotlib', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Looks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [HEAT_LIGHT, HEAT_DARK], ids=["light", "dark"])
def test_numbers_on_the_colors_of_the_map_can_be_read(steps: Sequence[tuple[str, str]]) -> None:
    for back, ink in steps:
        low, high = sorted((_luminance(back), _luminance(ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (back, ink)


def _luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_what_passed_is_pale_and_what_failed_is_not() -> None:
    """A coarse format that passes was darker than a kernel that fails."""
    html = page(made_run(120, failing=6), plots="none")
    cells = re.findall(
        r"<td class='(h\d)?( ?bad| ?open)?'><a href='#gate-\d+' title='([^']*)'", html
    )
    assert len(cells) >= 90
    for step, state, title in cells:
        if state.strip() == "bad":
            assert int(step[1]) >= 3, title
        elif not state:
            assert int(step[1]) <= 2, title
    rows = re.findall(r"<tr id=gate-\d+ class=(\w).*?</tr>|<tr id=gate-\d+ class=(\w)", html)
    assert rows
    assert "class=h7>" in html


@pytest.mark.parametrize(
    ("margin", "step"), [(0.0, 0), (0.98, 2), (1.0, 2), (1.01, 3), (math.inf, 7)]
)
def test_a_margin_has_a_step_of_color(margin: float, step: int) -> None:
    assert margin_step(margin) == step


def test_a_failing_gate_says_where_the_error_enters() -> None:
    html = page(made_run(120, failing=6), plots="none")
    run = made_run(120, failing=6)
    assert html.count("<dt>enters at</dt>") == sum(bool(c.gates) for c in run.causes)
    assert f"<dt>enters at</dt><dd><code>{run.causes[0].place}</code>" in html


def test_no_plot_has_a_coordinate_that_is_no_number() -> None:
    runs = [made_run(48, failing=48, seed=seed) for seed in range(3)]
    # The last one has an error that is no number at the output of a block.
    for run in [*runs, made_run(600, failing=9, layers=50, pictures=False)]:
        html = page(run, plots="all")
        assert '<path d="M' in html
        places = r" (?:d|points|x|y|cx|cy|r|transform|width|height)=[\"'][^\"']*(?:nan|inf)"
        assert not re.search(places, html)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "as an ideal quantizer"),
        ({"value": 1.01e-3, "times": 0.9}, "0.9x its limit (budget)"),
        ({"bound": 1e-1, "times": 1e-2}, "0.01x its limit (budget)"),
        ({"kind": "regression"}, "as accepted"),
    ],
)
def test_a_budget_that_is_not_used_is_no_figure(changes: dict[str, Any], words: str) -> None:
    times = 10**-0.05
    figures = {"value": 1e-3, "against": 1e-3, "bound": 1e-3 / times, "times": times}
    assert view_of(vars(made_check(**(figures | changes)))).distance == words
