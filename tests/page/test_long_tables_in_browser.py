"""Long tables in a real browser: the first rows are there at once, and all of them in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from qgate.page.comparisons import ComparedRun, compare
from qgate.page.reports import write_comparison
from qgate.page.runs import run_of_records
from tests.browser import opened
from tests.page.gate_records import made_header, made_records, read_back
from tests.shares import proof

COUNT = 600
# A page whose idle moments never come shows what is there before them.
NEVER_IDLE = "window.requestIdleCallback = () => 0"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with a gate in each row, the second with more failures."""
    runs, sides = [], []
    for name, failing in (("base", 1), ("change", 9)):
        header = made_header()
        records = read_back(made_records(COUNT, failing=failing, layers=50))
        runs.append(run_of_records(header, records, name))
        sides.append(ComparedRun(name, header, records))
    file = tmp_path_factory.mktemp("long") / "long.html"
    write_comparison(file, runs, compare(*sides), plots="none")
    return file


def sites(page: Page, table: str) -> list[str]:
    """Return the texts of the rows, as they are in the page."""
    script = "rows => rows.map(row => row.textContent.replace(/\\s+/g, ' ').trim())"
    rows: list[str] = page.eval_on_selector_all(f"{table} tbody tr", script)
    return rows


@proof
@pytest.mark.parametrize(("table", "kind"), [("#compared", ".compared"), ("#all-gates", ".gates")])
def test_rows_follow_in_order_and_are_all_there_without_scripts(
    browser: Browser, path: Path, table: str, kind: str
) -> None:
    with opened(browser, path, java_script_enabled=False) as it:
        assert it.page.locator(f"{table} tbody tr").count() == 100
        every_row = sites(it.page, f"table{kind}")
    assert len(every_row) >= COUNT
    with opened(browser, path) as it:
        rows = it.page.locator(f"{table} tbody tr")
        expect(rows).to_have_count(len(every_row))
        assert sites(it.page, table) == every_row
        assert it.complaints == []


@proof
def test_filters_sorting_links_and_paper_take_the_rows_that_are_not_there_yet(
    browser: Browser, path: Path
) -> None:
    options = {"viewport": {"width": 1280, "height": 901}}
    with opened(browser, path, **options) as it:
        it.page.add_init_script(NEVER_IDLE)
        rows = it.page.locator("#all-gates tbody tr")

        it.page.reload()
        expect(rows).to_have_count(100)
        expect(it.page.locator("#gates output")).to_have_text("600 of 600 shown")
        it.page.fill("#gates input[name=text]", "layers.49")
        expect(it.page.locator("#gates output")).to_have_text("12 of 600 shown")
        expect(rows).to_have_count(COUNT)

        it.page.goto(path.as_uri())
        it.page.reload()
        expect(rows).to_have_count(100)
        it.page.click("#all-gates button:text-is('seconds')")
        expect(rows).to_have_count(COUNT)

        it.page.goto(path.as_uri())
        it.page.reload()
        expect(rows).to_have_count(100)
        it.page.evaluate(f"location.hash = 'gate-{COUNT}'")
        expect(it.page.locator("tr:target")).to_be_focused()
        expect(it.page.locator(f"#gate-{COUNT}")).to_be_in_viewport()

        it.page.goto(path.as_uri())
        it.page.reload()
        expect(rows).to_have_count(100)
        it.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        expect(rows).to_have_count(COUNT)
        expect(it.page.locator("#compared tbody tr")).to_have_count(2 * COUNT)
        assert it.complaints == []
