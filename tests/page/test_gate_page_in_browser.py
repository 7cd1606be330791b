"""The page of gates in a real browser: filters, sorting, links, keyboard, print, accessibility."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from qgate.drawing.files import draw_analysis
from qgate.page.comparisons import ComparedRun, compare
from qgate.page.pages import page as gate_page
from qgate.page.reports import write_comparison
from qgate.page.runs import run_of_records
from tests import browser as browsers
from tests.browser import Opened, opened, serious_findings
from tests.drawing import dump_records
from tests.page.gate_records import hostile_run, made_header, made_records, made_run, read_back
from tests.shares import proof, share

pytestmark = share(8, group="pages")

BROKEN = {"suites/test_task.py::test_task[tiny-mamba-2-4]": "QgateError: no calibration"}
ROWS = "#all-gates tbody tr"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = made_run(120, header=made_header(broken=BROKEN))
    return written(tmp_path_factory.mktemp("page") / "report.html", gate_page(run))


def written(path: Path, html: str) -> Path:
    path.write_text(html, encoding="utf-8")
    return path


@pytest.fixture
def opened_page(browser: Browser, path: Path) -> Iterator[Opened]:
    with opened(browser, path) as it:
        yield it
        assert it.complaints == []


def visible(page: Page) -> list[str]:
    script = "rows => rows.filter(r => !r.hidden).map(r => r.id)"
    ids: list[str] = page.eval_on_selector_all(ROWS, script)
    return ids


def column(page: Page, name: str) -> list[str]:
    script = """(table, name) => {
      const at = [...table.tHead.rows[0].cells].findIndex(c => c.textContent.trim() === name);
      return [...table.tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[at].textContent);
    }"""
    cells: list[str] = page.eval_on_selector("#all-gates", script, name)
    return [cell.strip() for cell in cells]


# Reading ------------------------------------------------------------------------------------------


def test_it_opens_without_a_complaint_and_without_a_request(opened_page: Opened) -> None:
    assert len(visible(opened_page.page)) == 121
    assert [url for url in opened_page.requests if not url.startswith("data:")] == [
        opened_page.page.url
    ]
    expect(opened_page.page.locator("h1")).to_contain_text(
        "5 of 120 gates failed: backbone.layers.0.mixer.in_proj:output (tiny-mamba, mode int8) is not finite"
    )


@proof
def test_plots_are_drawn_with_the_colors_of_the_page(browser: Browser, path: Path) -> None:
    inks = []
    for scheme in ("light", "dark"):
        with opened(browser, path, color_scheme=scheme) as it:
            plots = it.page.locator("details[open] svg.plot")
            assert plots.count() >= 10
            sizes = plots.evaluate_all("all => all.map(p => p.getBoundingClientRect().width)")
            assert min(sizes) > 150
            inks.append(plots.first.evaluate("p => getComputedStyle(p).fill"))
    assert inks[0] != inks[1]


def test_verdicts_and_tables_are_there_with_scripts_blocked(browser: Browser, path: Path) -> None:
    with opened(browser, path, java_script_enabled=False) as it:
        expect(it.page.locator("h1")).to_contain_text("5 of 120 gates failed")
        expect(it.page.locator(".qgate-head")).to_contain_text("114 passed")
        expect(it.page.locator(ROWS)).to_have_count(121)
        expect(it.page.locator("form.filters")).to_be_hidden()
        it.page.locator("td.bad a").first.click()
        assert re.search(r"#gate-\d+$", it.page.url)
        expect(it.page.locator("tr:target")).to_be_in_viewport()
        it.page.locator("details:not([open]) summary").first.click()
        expect(it.page.locator("details").nth(3).locator("table")).to_be_visible()


@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_nothing_is_wider_than_the_window(browser: Browser, path: Path, width: int) -> None:
    with opened(browser, path, viewport={"width": width, "height": 900}) as it:
        assert it.page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, written(tmp_path / "x.html", gate_page(hostile_run()))) as it:
        expect(it.page.locator("script")).to_have_count(1)
        expect(it.page.locator("a[href^='javascript']")).to_have_count(0)
        assert it.page.evaluate("document.documentElement.scrollWidth") <= 1280
        it.page.select_option("select[name=mode]", index=1)
        expect(it.page.locator("output")).to_have_text("1 of 40 shown")
        assert it.complaints == []


# Filters, sorting, links --------------------------------------------------------------------------


def test_filters_narrow_the_rows_and_say_how_many(opened_page: Opened) -> None:
    page = opened_page.page
    page.select_option("select[name=verdict]", "failed")
    expect(page.locator("output")).to_have_text("5 of 121 shown")
    assert set(column(page, "verdict")) == {"failed"}
    page.select_option("select[name=mode]", "2-1")
    expect(page.locator("output")).to_have_text("2 of 121 shown")
    page.select_option("select[name=layer]", "layers.4")
    expect(page.locator("output")).to_have_text("1 of 121 shown")
    page.click("form button[type=reset]")
    expect(page.locator("output")).to_have_text("121 of 121 shown")
    page.fill("input[name=text]", "layers.11 MXFP8")
    expect(page.locator("output")).to_have_text("1 of 121 shown")
    page.fill("input[name=text]", "nothing like it")
    expect(page.locator("output")).to_have_text("0 of 121 shown")
    assert page.get_attribute("output", "aria-live") == "polite"


def test_text_finds_a_gate_by_all_that_failed_in_it(browser: Browser, tmp_path: Path) -> None:
    records = list(made_records(12, failing=1))
    failed = next(record for record in records if not record["passed"])
    for site_name in ("x_proj:weight", "dt_proj:weight"):
        checks = [{**check, "times": 1.01} for check in failed["checks"]]
        records.append({**failed, "site": f"layers.0.mixer.{site_name}", "checks": checks})
    html = gate_page(run_of_records(made_header(), records), plots="none")
    with opened(browser, written(tmp_path / "x.html", html)) as it:
        for words in ("x_proj:weight", "layers.0.mixer.dt_proj:weight"):
            it.page.fill("input[name=text]", words)
            expect(it.page.locator("output")).to_have_text("1 of 12 shown")
            assert column(it.page, "verdict") == ["failed"]


def test_what_has_no_verdict_can_be_found_and_is_not_green(opened_page: Opened) -> None:
    page = opened_page.page
    page.select_option("select[name=verdict]", "no verdict")
    expect(page.locator("output")).to_have_text("1 of 121 shown")
    cell = page.locator(f"{ROWS}:not([hidden]) td").first
    good = page.locator(".qgate-head .good").evaluate("e => getComputedStyle(e).color")
    assert cell.evaluate("e => getComputedStyle(e).color") != good


def test_a_filtered_and_sorted_table_is_in_the_address(browser: Browser, path: Path) -> None:
    with opened(browser, path) as it:
        it.page.select_option("select[name=mode]", "2-2")
        it.page.fill("input[name=text]", "layers.1")
        it.page.click("#all-gates button:text-is('margin')")
        expect(it.page.locator("output")).to_have_text("6 of 121 shown")
        address, rows = it.page.url, visible(it.page)
        assert "mode=2-2" in address
    with opened(browser, path) as it:
        it.page.goto(address)
        it.page.reload()
        expect(it.page.locator("output")).to_have_text("6 of 121 shown")
        assert visible(it.page) == rows
        assert it.page.input_value("input[name=text]") == "layers.1"
        expect(it.page.locator("th[aria-sort=descending]")).to_have_text("margin")
        it.page.goto(f"{path.as_uri()}#show&mode=unknown&sort=nothing")
        it.page.reload()
        expect(it.page.locator("output")).to_have_text("121 of 121 shown")
        assert it.complaints == []


def numbers(texts: list[str]) -> list[float]:
    matches = (re.search(r"[\d.]+(e[-+]\d+)?", text) for text in texts)
    return [float(match[0]) for match in matches if match]


@pytest.mark.parametrize("name", ["value", "limit", "margin", "seconds"])
def test_numbers_are_sorted_by_size(opened_page: Opened, name: str) -> None:
    page = opened_page.page
    page.click(f"#all-gates button:text-is('{name}')")
    falling = numbers(column(page, name))
    assert falling == sorted(falling, reverse=True)
    page.click(f"#all-gates button:text-is('{name}')")
    rising = numbers(column(page, name))
    assert rising == sorted(rising)
    assert len(rising) == len(falling) > 100


@proof
def test_every_column_sorts_and_the_worst_come_back(opened_page: Opened) -> None:
    page = opened_page.page
    before = visible(page)
    for button in page.locator("#all-gates thead button").all():
        button.click()
        expect(page.locator("#all-gates th[aria-sort]")).to_have_count(1)
        assert sorted(visible(page)) == sorted(before)
    layers = page.locator("#all-gates button:text-is('layer')")
    layers.click()
    assert column(page, "layer")[0] == "layers.11"
    page.click("form button[type=reset]")
    assert visible(page) == before


def test_a_cell_of_the_map_leads_to_its_row_even_where_that_is_filtered(
    opened_page: Opened,
) -> None:
    page = opened_page.page
    link = page.locator("td.bad a").last
    target = str(link.get_attribute("href"))
    page.select_option("select[name=verdict]", "passed")
    expect(page.locator(target)).to_be_hidden()
    link.click()
    expect(page.locator(target)).to_be_in_viewport()
    expect(page.locator(target)).to_be_focused()
    expect(page.locator("output")).to_contain_text("105 of")
    page.evaluate("scrollTo(0, 0)")
    link.click()
    expect(page.locator(target)).to_be_in_viewport()


def test_a_row_leads_to_its_details_and_opens_them(opened_page: Opened) -> None:
    page = opened_page.page
    assert not page.locator("details").nth(4).get_attribute("open")
    name = page.locator("details").nth(4).get_attribute("id")
    page.locator(f"a[href='#{name}']").click()
    expect(page.locator(f"#{name} table")).to_be_in_viewport()


# Two runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second with other failures."""
    runs, sides = [], []
    for name, failing in (("base", 4), ("worse <b>", 7)):
        header, records = made_header(), read_back(made_records(60, failing=failing))
        runs.append(run_of_records(header, records, name))
        sides.append(ComparedRun(name, header, records))
    path = tmp_path_factory.mktemp("compared") / "compared.html"
    write_comparison(path, runs, compare(*sides), plots="none")
    return path


def test_two_runs_are_compared_and_the_view_is_in_the_address(
    browser: Browser, compared_path: Path
) -> None:
    selector = "#compared tbody tr:not([hidden]) td:first-child"
    with opened(browser, compared_path) as it:
        page = it.page
        expect(page.locator("h1")).to_contain_text("passed in base")
        expect(page.locator("#comparison table").first.locator("tbody tr")).to_have_count(2)
        page.select_option("select[name=change]", "broke")
        expect(page.locator("#comparison output")).to_have_text("6 of 120 shown")
        assert set(page.locator(selector).all_inner_texts()) == {"broke"}
        page.click("#compared button:text-is('moved')")
        address = page.url
        assert "table=compared" in address
        assert page.get_attribute("#comparison a.here", "href") == f"#{address.partition('#')[2]}"
        rows = page.locator(selector).locator("xpath=..").all_inner_texts()
        expect(page.locator("#gates output")).to_have_text("60 of 60 shown")
    with opened(browser, compared_path) as it:
        it.page.goto(address)
        it.page.reload()
        assert it.page.locator(selector).locator("xpath=..").all_inner_texts() == rows
        assert it.page.input_value("select[name=change]") == "broke"
        assert it.complaints == []


@proof
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_of_two_runs_keeps_nobody_out(
    browser: Browser, compared_path: Path, width: int
) -> None:
    size = {"width": width, "height": 900}
    with opened(browser, compared_path, color_scheme="dark", viewport=size) as it:
        assert serious_findings(it.page) == []
        assert it.page.evaluate("document.documentElement.scrollWidth") <= width


def test_counts_and_modes_lead_to_their_rows(opened_page: Opened) -> None:
    page = opened_page.page
    page.click(".qgate-head a:has-text('failed')")
    expect(page.locator("#gates output")).to_have_text("5 of 121 shown")
    page.click("table.heat tbody th a:text-is('2-1')")
    expect(page.locator("#gates output")).to_have_text("24 of 121 shown")
    assert page.get_attribute("#gates a.here", "href") == "#show&mode=2-1"


def test_a_phone_shows_value_and_limit(browser: Browser, path: Path) -> None:
    with opened(browser, path, viewport={"width": 400, "height": 900}) as it:
        for table in (".gate[open] table.checks", "#all-gates"):
            it.page.locator(table).first.scroll_into_view_if_needed()
            for head in ("site", "value", "limit"):
                cell = it.page.locator(f"{table} thead th:has-text('{head}'):visible").first
                box = cell.bounding_box()
                assert box is not None
                assert 0 <= box["x"] < box["x"] + box["width"] <= 400, (table, head)


# Keyboard and screen readers ----------------------------------------------------------------------


def test_the_keyboard_reaches_everything(opened_page: Opened) -> None:
    page = opened_page.page
    page.keyboard.press("Tab")
    expect(page.locator("a.skip")).to_be_focused()
    assert page.locator("a.skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    expect(page.locator("#gates")).to_be_focused()  # a link is followed after its key has come up
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('thead') !== null"):
            break
    focused = page.locator(":focus")
    assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#all-gates th[aria-sort=descending]")).to_have_count(1)


def test_arrows_walk_the_map_which_is_one_stop_of_the_tab_key(opened_page: Opened) -> None:
    page = opened_page.page
    expect(page.locator("table.heat a[tabindex='0']")).to_have_count(1)
    page.locator("table.heat a[tabindex='0']").focus()
    start = page.evaluate("document.activeElement.closest('td').cellIndex")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.closest('td').cellIndex") == start + 1
    assert page.locator(":focus").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("tr:target")).to_be_focused()


@share(8, group="axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_axe_has_no_serious_finding(browser: Browser, path: Path, scheme: Any, width: int) -> None:
    size = {"width": width, "height": 900}
    with opened(browser, path, color_scheme=scheme, viewport=size) as it:
        assert serious_findings(it.page) == []


@share(8, group="axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_axe_has_no_serious_finding_on_the_page_of_a_dump(
    browser: Browser, tmp_path: Path, scheme: Any, width: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw_analysis(dump_records.normal_record(), tmp_path, plots=False)
    size = {"width": width, "height": 900}
    with opened(browser, tmp_path / "index.html", color_scheme=scheme, viewport=size) as it:
        assert serious_findings(it.page) == []
        it.page.click("nav.tabs a[href='#worst']")
        it.page.locator("table.sortable button").first.click()
        expect(it.page.locator("th[aria-sort]")).to_have_count(1)
        assert it.complaints == []


# Paper and size -----------------------------------------------------------------------------------


def test_it_prints_with_details_open_and_without_what_paper_cannot_do(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path, color_scheme="dark") as it:
        it.page.emulate_media(media="print")
        expect(it.page.locator("form.filters")).to_be_hidden()
        expect(it.page.locator("nav")).to_be_hidden()
        for box in it.page.locator(".scroll").all():
            assert box.evaluate("e => e.scrollHeight <= e.clientHeight + 1")
        assert it.page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
        closed = it.page.locator("details:not([open])").count()
        assert closed
        it.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        expect(it.page.locator("details:not([open])")).to_have_count(0)
        it.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert it.page.locator("details:not([open])").count() == closed
        printed = it.page.pdf(prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    assert 3 < len(re.findall(rb"/Type\s*/Page\b", printed)) < 40


@proof
def test_two_thousand_gates_are_small_and_work(browser: Browser, tmp_path: Path) -> None:
    html = gate_page(made_run(2000, failing=60, layers=50), plots="all")
    assert len(html.encode()) < 10_000_000
    with opened(browser, written(tmp_path / "x.html", html)) as it:
        it.page.select_option("select[name=verdict]", "failed")
        expect(it.page.locator("output")).to_have_text("50 of 2,000 shown")
        assert it.complaints == []


def test_without_a_browser_the_command_that_installs_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with (
        pytest.raises(pytest.fail.Exception, match="apt-get install chromium"),
        browsers.chromium(),
    ):
        pass
