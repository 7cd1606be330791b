"""The page of a run beside its gates: other tests, runs that were interrupted, updates."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from qgate.cli import main
from qgate.page.pages import map_fragment, page, summary_head
from qgate.page.reports import load, markdown_report
from qgate.page.runs import EVERYWHERE, Run, run_of_records
from qgate.results import merge, read
from qgate.results.run_facts import other_tests_record
from qgate.results.schema import Record
from tests.browser import Opened, opened
from tests.page.gate_records import HOSTILE, made_header, made_records, made_run
from tests.page.test_gate_page import first_line
from tests.results.making import record, write
from tests.shares import proof, share

CASES = {f"suites/test_formats.py::test_it[{n}]": f"AssertionError: {n} of 9" for n in range(30)}


def other(failures: dict[str, str], passed: int = 7) -> dict[str, Any]:
    outcomes = {**dict.fromkeys(failures, "failed"), **{f"p{n}": "passed" for n in range(passed)}}
    return other_tests_record(outcomes, failures)


def run_with(gates: int = 12, failing: int = 0, **header: Any) -> Run:
    return made_run(gates, failing=failing, header=made_header(**header))


def test_pictures_are_kept_of_the_worst_gates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the pictures of gates that no page has room for."""
    with_pictures = [
        gate.node for gate in made_run(40, failing=3).gates if "pictures" in gate.record
    ]
    assert len(with_pictures) > 12
    for most in (12, 6, 1):
        monkeypatch.setattr("qgate.page.runs.MOST_DRAWN", most)
        run = made_run(40, failing=3)
        pictured = [gate.node for gate in run.gates if "pictures" in gate.record]
        assert pictured == with_pictures[:most]


# Other tests --------------------------------------------------------------------------------------


def test_other_tests_that_failed_are_the_first_line_where_all_gates_passed() -> None:
    run = run_with(exit=1, other=other({"t.py::test_a": "assert 1"}))
    assert not run.passed
    html = page(run, plots="none")
    assert (
        first_line(html) == "1 other test failed, 7 passed: t.py::test_a: assert 1; 12 gates passed"
    )
    assert "qgate-head failed" in html
    assert "<b>12</b> passed" in html
    part = html.partition("id='others'")[2].partition("</section>")[0]
    assert "t.py::test_a" in part.replace("<wbr>", "")


def test_beside_gates_that_failed_they_are_counted() -> None:
    html = page(run_with(failing=1, exit=1, other=other(CASES)), plots="none")
    assert first_line(html).startswith("1 of 12 gates failed, 1 fault in 2-1: ")
    assert "30 other tests failed, 7 passed" in first_line(html)


def test_cases_of_one_test_are_one_line_to_open() -> None:
    html = page(run_with(exit=1, other=other(CASES)), plots="none")
    part = html.partition("id='others'")[2].partition("</section>")[0].replace("<wbr>", "")
    assert "30 failed</b> <code>suites/test_formats.py::test_it</code>" in " ".join(part.split())
    assert part.count("<details") == 1
    assert part.count("<code>") == 31


def test_no_more_than_two_hundred_are_kept_and_the_rest_is_counted() -> None:
    many = other({f"n{k}": "x" * 900 for k in range(250)})
    assert (many["failed"], len(many["failures"])) == (250, 200)
    assert max(map(len, many["failures"].values())) == 300
    assert "50 more are not listed" in page(run_with(exit=1, other=many), plots="none")


@pytest.mark.parametrize("name", HOSTILE)
def test_their_names_are_text(name: str) -> None:
    html = page(run_with(exit=1, other=other({name: name})), plots="none")
    assert html.count("<script") == 1
    assert not [char for char in html if char != "\n" and not char.isprintable()]


def test_those_of_workers_are_put_together(tmp_path: Path) -> None:
    other_tests_by_worker = [other({"a": "x"}, passed=1), other({"b": "y"}, passed=2)]
    paths = [
        write(tmp_path / f"{n}.jsonl", record(f"s{n}"), other=other_tests, exit=1, started="t")
        for n, other_tests in enumerate(other_tests_by_worker)
    ]
    merge(paths, tmp_path / "r.jsonl")
    header, _ = read(tmp_path / "r.jsonl")
    assert header["other"] == {
        "passed": 3, "failed": 2, "skipped": 0, "failures": {"a": "x", "b": "y"}
    }  # fmt: skip


# The end of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "passed"),
    [({}, True), ({"exit": 0}, True), ({"exit": None}, False), ({"exit": 1}, False),
     ({"exit": 2}, False), ({"exit": 0, "other": other({})}, True)],
)  # fmt: skip
def test_a_run_passed_only_if_it_came_to_its_end(header: Record, passed: bool) -> None:
    run = run_with(**header)
    assert run.passed is passed
    html = page(run, plots="none")
    assert ("<h1><span class='good'>" in html) is passed
    assert ("qgate-head passed" in html) is passed


def test_a_killed_run_says_so_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "r.jsonl", record("a"), exit=None)
    loaded = load(path, "r")
    assert first_line(page(loaded.run)) == "The run did not finish: 1 gate passed"
    assert markdown_report([loaded]).startswith("## qgate: the run did not finish; 1 gate passed")
    outputs = [f"-o={tmp_path / 'r.json'}", f"-o={tmp_path / 'r.html'}", "--exit-code"]
    assert main(["report", str(path), *outputs]) == 1
    assert "the run did not come to its end" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())["runs"][0]
    assert (report["finished"], report["passed"]) == (False, False)


def test_a_comparison_with_a_killed_run_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where neither was complete: what is missing in one is not gone."""
    files = [
        write(tmp_path / f"{name}.jsonl", record("a"), exit=status, complete=False)
        for name, status in (("a", 0), ("b", None))
    ]
    assert main(["report", *map(str, files), f"-o={tmp_path / 'r.md'}"]) == 0
    assert "b was broken off before its end" in capsys.readouterr().out


# The head -----------------------------------------------------------------------------------------


def test_the_head_has_baselines_what_was_left_out_and_what_was_written() -> None:
    update = {"which": "failed", "dry_run": False, "done": True, "entries": 230,
              "changes": [f"int8.txt: s{n}: 1 -> 2" for n in range(200)], "stale": ["tiny int8"]}  # fmt: skip
    run = run_with(exit=0, baselines="elsewhere", notes=["2 suites left out"], update=update)
    head = summary_head(run)
    for text in ("<dd>elsewhere; reference fp32", "<dt>left out</dt><dd>2 suites left out",
                 "<dt>update</dt><dd>230 entries written (failed)", "stale", "tiny int8"):  # fmt: skip
        assert text in head
    html = page(run, plots="none")
    assert first_line(html) == "12 gates passed: baselines: 230 entries written (failed)"
    assert "int8.txt: s199: 1 -&gt; 2" in html
    assert "30 more are in the baselines" in html


def test_a_dry_run_and_one_that_wrote_nothing_say_so() -> None:
    dry = {
        "which": "new",
        "dry_run": True,
        "done": True,
        "entries": 1,
        "changes": ["a"],
        "stale": [],
    }
    assert "1 entry would change (new)" in summary_head(run_with(update=dry))
    none = {**dry, "done": False, "entries": 0, "changes": []}
    html = page(run_with(update=none), plots="none")
    assert "nothing written (new)" in html
    assert "id='update'" not in html


def test_one_cause_of_many_errors_is_said_once() -> None:
    html = page(
        run_with(exit=1, broken=dict.fromkeys(("a", "b", "c"), "no baseline")), plots="none"
    )
    part = html.partition("id='unknown'")[2].partition("</section>")[0]
    assert part.count("no baseline") == 1
    assert "no verdict for 3 tests" in part


# The map ------------------------------------------------------------------------------------------


def over_layers() -> Iterator[Record]:
    yield from made_records(24, failing=0)
    (first, *_) = made_records(1, failing=0)
    for layer in ("layers.0", "layers.3"):
        yield {**first, "node": "t.py::test_reference", "mode": "fp32", "layer": layer}


def test_a_test_over_all_layers_has_a_column_of_its_own() -> None:
    run = run_of_records(made_header(), over_layers())
    (error,) = (error for error in run.layer_errors if error.mode == "fp32")
    assert error.layer == EVERYWHERE
    heads = re.findall(r"<th scope='col'.*?<span>(.*?)</span>", page(run, plots="none"))
    assert heads[-1] == EVERYWHERE


def test_a_fragment_of_the_map_brings_its_looks_and_the_links_of_its_page() -> None:
    run = made_run(24)
    html = map_fragment(run, lambda gate: f"#<{gate.number}>", 100)
    assert html.count("<style>") == 1
    assert "href='#&lt;1&gt;'" in html
    assert "#gate-" not in html
    assert map_fragment(run, lambda _: "#", 3) == ""


def test_what_to_type_is_that_of_the_record() -> None:
    run = made_run(12, failing=2)
    gate = run.failed[0]
    stored = {**gate.record, "commands": {"again": "pytest a", "accept": "pytest b"}}
    changed = dataclasses.replace(gate, record=stored)
    html = page(dataclasses.replace(run, gates=(changed, *run.gates[1:])), plots="none")
    assert "<code>pytest a</code>" in html


# In a browser -------------------------------------------------------------------------------------


@pytest.fixture
def opened_page(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    path = tmp_path / "r.html"
    path.write_text(page(run_with(120, 12, exit=1, other=other(CASES))), encoding="utf-8")
    with opened(browser, path) as it:
        yield it
        assert it.complaints == []


@proof
def test_the_worst_three_are_open_and_a_button_opens_all(opened_page: Opened) -> None:
    gates = opened_page.page.locator("details.gate")
    expect(gates).to_have_count(12)
    opened_ones = opened_page.page.locator("details.gate[open]")
    expect(opened_ones).to_have_count(3)
    button = opened_page.page.get_by_role("button", name="Open all")
    button.click()
    expect(opened_ones).to_have_count(12)
    opened_page.page.get_by_role("button", name="Close all").click()
    expect(opened_ones).to_have_count(0)
    gates.first.locator("summary").click()
    expect(button).to_have_text("Open all")


@proof
def test_a_link_to_a_gate_opens_its_details(opened_page: Opened) -> None:
    number = str(opened_page.page.locator("details.gate").nth(7).get_attribute("id")).partition(
        "-"
    )[2]
    details = opened_page.page.locator(f"#details-{number}")
    expect(details).not_to_have_attribute("open", "")
    opened_page.page.goto(f"{opened_page.page.url}#gate-{number}")
    expect(details).to_have_attribute("open", "")
    expect(opened_page.page.locator(f"#gate-{number}")).to_be_in_viewport()


@share(3)
@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_words_of_tables_are_not_torn(browser: Browser, tmp_path: Path, width: int) -> None:
    """A word that is torn has its letters at several heights."""
    torn = """[...document.querySelectorAll('table.gates :is(td, th), table.checks :is(td, th)')]
      .flatMap(cell => [...cell.childNodes].flatMap(n => n.nodeType === 3 ? [n] : [...n.childNodes]))
      .filter(node => node.nodeType === 3).flatMap(node => {
        const found = [];
        for (const word of node.data.matchAll(/[A-Za-z_@]+/g)) {
          const range = document.createRange();
          range.setStart(node, word.index);
          range.setEnd(node, word.index + word[0].length);
          const tops = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
          if (tops.size > 1) found.push(word[0]);
        }
        return found;
      })"""
    path = tmp_path / "r.html"
    records = [*made_records(60, failing=6)]
    for each_record in records:
        for check in each_record["checks"]:
            check["metric"] = check["metric"] and "one_minus_correlation@worst_channel"
            check["scope"] = "backward"
    path.write_text(page(run_of_records(made_header(), records), plots="none"), encoding="utf-8")
    with opened(browser, path, viewport={"width": width, "height": 900}) as it:
        it.page.locator("#gates").scroll_into_view_if_needed()
        assert it.page.evaluate(torn) == []
        pages = it.page.evaluate("document.documentElement.scrollWidth")
        assert pages <= width


@proof
def test_on_paper_all_gates_are_open_without_scripts_and_heads_can_repeat(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "r.html"
    path.write_text(page(run_with(120, 12, exit=1, other=other(CASES))), encoding="utf-8")
    with opened(browser, path, java_script_enabled=False) as it:
        it.page.emulate_media(media="print")
        tables = it.page.locator("details.gate:not([open]) table.checks")
        expect(tables).to_have_count(9)
        heights = tables.evaluate_all("all => all.map(t => t.checkVisibility())")
        assert all(heights)
        # Chromium repeats no head that has a box of its own in it, such as a button.
        button = it.page.locator("#all-gates thead button").first
        assert button.evaluate("b => getComputedStyle(b).display") == "contents"


@proof
def test_a_large_table_is_sorted_in_parts_and_comes_whole(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    html = page(made_run(2600, failing=6, layers=50, pictures=False), plots="none")
    path.write_text(html, encoding="utf-8")
    with opened(browser, path) as it:
        rows = it.page.locator("#all-gates tbody tr")
        it.page.select_option("select[name=mode]", "2-2")
        expect(it.page.locator("output")).not_to_have_text("2,600 of 2,600 shown")
        it.page.click("#all-gates button:text-is('seconds')")
        it.page.click("form button[type=reset]")
        it.page.click("#all-gates button:text-is('seconds')")
        assert rows.count() < 2600
        expect(rows).to_have_count(2600)
        seconds = [float(text) for text in rows.locator("td:last-child").all_inner_texts()]
        assert seconds == sorted(seconds, reverse=True)
        it.page.click("#all-gates button:text-is('site')")
        last = it.page.evaluate("'gate-' + 2600")
        it.page.evaluate(f"location.hash = '{last}'")
        expect(it.page.locator(f"#{last}")).to_be_in_viewport()
        expect(rows).to_have_count(2600)
        assert it.complaints == []
