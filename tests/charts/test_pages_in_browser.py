"""The pages of sweeps, dumps and activations in a real browser: sorted, complete, for everyone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from qgate.activation_stats.files import write_report
from qgate.activation_stats.settings import ActivationSettings, with_values
from qgate.checkpoints.files import write_files
from qgate.drawing.files import draw_analysis
from qgate.engines.files import write_files as write_engine_files
from qgate.engines.record import SiteDifference
from qgate.sweeps.findings import SweptFormat, entry_of
from qgate.sweeps.page import write_page
from qgate.sweeps.plots import PICTURES
from tests.activation_stats import activation_records
from tests.browser import opened, serious_findings
from tests.checkpoints import checkpoint_records
from tests.drawing import dump_records
from tests.engines import engine_records
from tests.shares import proof, share, slow_file
from tests.sweeps import sweep_records

pytestmark = slow_file

NAME = "<script>alert(1)</script>'\"&.pt"


def _sweep(folder: Path) -> Path:
    entries: list[SweptFormat] = []
    for number, name in enumerate((NAME, "model.layers.11.mlp.down_proj.pt", "small.pt")):
        (folder / f"t{number}").mkdir()
        for record in sweep_records.realistic():
            record["tensor"]["source"] = name
            png_by_name = {}
            for picture in PICTURES:
                if picture.kind == record["kind"]:
                    path = folder / f"t{number}" / f"{picture.stem}.png"
                    picture.draw(path, record, dpi=30)
                    png_by_name[path.name] = path.read_bytes()
            (folder / f"t{number}" / "a.json").write_text("{}")
            entries.append(entry_of(record, f"t{number}", ["a.json", *png_by_name]))
    (folder / "old").mkdir()
    (folder / "old" / "mxfp_scaling_fp8_e4m3.json").write_text("{}")
    entries[0]["failed"], entries[1]["gap_db"], entries[2]["sqnr_db"] = "1 NaN", -2.0, 1.5
    results = [(NAME, "1 NaN in the tensor"), ("b.pt", None), ("small.pt", None)]
    return Path(write_page(folder, entries, results, "21 levels"))


def _activations(folder: Path) -> Path:
    record = activation_records.hostile()
    record["panels"] = {k: dict(list(p.items())[-1:]) for k, p in record["panels"].items()}
    return write_report(
        record,
        folder,
        with_values(ActivationSettings(), {"dpi": 40, "output.formats": ["html", "csv"]}),
    )[0]


def _dumps(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw_analysis(dump_records.hostile_names(), folder, dpi=20)
    return folder / "index.html"


def _checkpoints(folder: Path) -> Path:
    record = checkpoint_records.hostile()
    record.weights = record.weights[::8]  # axe visits every node; all names are in the findings
    return Path(write_files(folder, record))


def _engines(folder: Path) -> Path:
    return Path(write_engine_files(folder, engine_records.hostile(), []))


PAGES: dict[str, Callable[[Path], Path]] = {
    "sweep": _sweep, "activations": _activations, "dumps": _dumps, "checkpoints": _checkpoints,
    "engines": _engines,
}  # fmt: skip


# A page takes seconds to make: a run makes one of them.
one_page = share(10, group="pages", unit="path")


@pytest.fixture(scope="module", params=PAGES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return PAGES[request.param](tmp_path_factory.mktemp(request.param))


@one_page
def test_it_opens_offline_without_a_complaint_and_shows_all_pictures(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path) as it:
        images = it.page.locator("img")
        assert it.page.locator("img, svg.plot").count() >= 5
        for tab in it.page.locator("nav.tabs a").all() or [it.page.locator("h1")]:
            tab.click()
            for image in it.page.locator("img:visible").all():
                image.scroll_into_view_if_needed()
        script = "all => all.filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
        if images.count():
            expect(images.last).to_have_js_property("complete", True)
        assert images.evaluate_all(script) == []
        assert it.page.locator("script").count() == 1
        assert all(url.startswith(("file:", "data:")) for url in it.requests)
        assert it.complaints == []


@share(15)
@pytest.mark.parametrize(
    "options", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 400, "height": 800}}]
)
def test_nobody_is_kept_out(browser: Browser, path: Path, options: dict[str, object]) -> None:
    with opened(browser, path, **options) as it:
        assert serious_findings(it.page) == []
        width = it.page.viewport_size["width"]  # type: ignore[index]
        assert it.page.evaluate("document.documentElement.scrollWidth") <= width


@one_page
def test_links_of_the_contents_lead_to_sections(browser: Browser, path: Path) -> None:
    with opened(browser, path) as it:
        links = it.page.locator("nav a").evaluate_all("all => all.map(a => a.hash.slice(1))")
        assert len(links) >= 3
        for anchor in links:
            assert it.page.locator(f"[id='{anchor}']").count() == 1


def _one_finding(folder: Path) -> Path:
    return Path(write_files(folder, checkpoint_records.large()))


def _one_local_site(folder: Path) -> Path:
    record = engine_records.hostile()
    sites = [SiteDifference(f"m.{at} forward output", "carried", 0.1, 0.1) for at in range(120)]
    record.sites = [SiteDifference("m.7 forward output", "local", 0.1, 0.1), *sites]
    return Path(write_engine_files(folder, record, []))


@proof
@pytest.mark.parametrize(
    ("write", "table", "choice", "count", "columns"),
    [
        (_one_finding, "all-weights", ("verdict", "finding"), "1 of 867",
         ("weight", "over ideal (dB)", "limit (dB)")),
        (_one_local_site, "all-sites", ("difference", "starts here"), "1 of 121",
         ("tensor", "difference", "relative MSE")),
    ],
)  # fmt: skip
def test_filters_are_in_the_address_and_a_phone_shows_value_and_limit(
    browser: Browser,
    tmp_path: Path,
    write: Callable[[Path], Path],
    table: str,
    choice: tuple[str, str],
    count: str,
    columns: tuple[str, ...],
) -> None:
    path = write(tmp_path)
    form = f"form[data-table={table}]"
    with opened(browser, path) as it:
        it.page.select_option(f"{form} select[name={choice[0]}]", choice[1])
        expect(it.page.locator(f"{form} output")).to_have_text(f"{count} shown")
        address = it.page.url
        href = it.page.get_attribute(f"{form} a.here", "href")
        assert f"#{address.partition('#')[2]}" == href
        assert f"table={table}" in address
    with opened(browser, path, viewport={"width": 400, "height": 900}) as it:
        it.page.goto(address)
        it.page.reload()
        rows = it.page.locator(f"#{table} tbody tr:not([hidden])")
        expect(rows).to_have_count(1)
        for selector, heads in (
            (f"#{table}", columns),
            ("table.evidence", ("finding", "value", "limit", "how far")),
        ):
            for head in heads:
                cell = it.page.locator(f"{selector} thead th:has-text('{head}'):visible").first
                box = cell.bounding_box()
                assert box is not None
                assert 0 <= box["x"] < box["x"] + box["width"] <= 400, (selector, head)
        assert it.complaints == []


@proof
def test_tabs_show_one_section_at_a_time(browser: Browser, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw_analysis(dump_records.normal_record(), tmp_path, plots=False)
    with opened(browser, tmp_path / "index.html") as it:
        page, sections = it.page, it.page.locator("section:visible")
        expect(sections).to_have_count(1)
        expect(page.locator("#overview")).to_be_visible()
        page.click("nav.tabs a[href='#formats']")
        expect(sections).to_have_id("formats")
        page.keyboard.press("ArrowRight")
        expect(sections).to_have_id("distributions")
        expect(page.locator("[role=tab][aria-selected=true]")).to_be_focused()
        assert page.url.endswith("#distributions")
        assert serious_findings(page) == []
        page.goto(f"{page.url.partition('#')[0]}#files")
        page.reload()
        expect(sections).to_have_id("files")
        page.emulate_media(media="print")
        assert sections.count() > 10
        assert it.complaints == []
    with opened(browser, tmp_path / "index.html", java_script_enabled=False) as it:
        assert it.page.locator("section:visible").count() > 10


@one_page
def test_all_is_there_with_scripts_blocked(browser: Browser, path: Path) -> None:
    with opened(browser, path, java_script_enabled=False) as it:
        expect(it.page.locator("table.sortable tbody tr").first).to_be_visible()
        expect(it.page.locator("ul.findings li, table.evidence td").first).to_be_visible()


@proof
def test_tables_of_sweeps_fit_a_window_of_1400_pixels(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, _sweep(tmp_path), viewport={"width": 1400, "height": 900}) as it:
        wide = it.page.locator(".scroll:visible").evaluate_all(
            "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.ariaLabel)"
        )
    assert wide == []


@proof
def test_sweeps_are_sorted_by_a_click_and_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, _sweep(tmp_path)) as it:
        cells = it.page.locator("#all-sweeps tbody td:nth-child(5)")
        assert (
            it.page.locator("#all-sweeps tbody tr")
            .first.inner_text()
            .startswith("<script>alert(1)</script>")
        )
        button = it.page.locator("#all-sweeps thead th:nth-child(5) button")
        button.click()
        values = [float(text) for text in cells.all_inner_texts()]
        assert values == sorted(values, reverse=True)
        button.press("Enter")
        assert float(cells.first.inner_text()) == 1.5
        expect(it.page.locator("#all-sweeps thead th:nth-child(5)")).to_have_attribute(
            "aria-sort", "ascending"
        )
        expect(it.page.locator("#others")).to_contain_text("mxfp_scaling_fp8_e4m3.json")
        it.page.locator("td.files a").first.click()
        assert it.page.url.endswith((".json", ".png"))
