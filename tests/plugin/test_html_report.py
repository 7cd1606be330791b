"""The page of pytest-html with gates in it: columns, the head, plots; opened in a real browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qgate.plugin.html_columns import _key
from tests.browser import PATIENCE_MS
from tests.plugin.conftest import Run, run_alone
from tests.shares import proof

COLUMNS = ["mode", "layer", "metric", "value", "limit", "margin", "change"]
EVIL = "<script>alert(1)</script>"
SUITE = f'''
import pytest
from qgate.gate import Measured
from qgate.gate.measuring.pictures import error_picture
import torch

def m(site, value, *pictures):
    return [Measured(site=site, layer="layers.0", scope="task", order=0, nonfinite=0,
        values={{"kl_divergence": value}}, gated=("kl_divergence",), pictures=pictures)]

def drawn(scale):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    return error_picture([(x + scale * torch.randn(64, 8), x)])

def test_good(gate, mode): gate(m("mine.good", 0.5, drawn(0.01)), mode)
def test_bad(gate, mode): gate(m("{EVIL}", BAD, drawn(0.3)), mode)
@pytest.mark.parametrize("x", ["<img src=x onerror=alert(2)>"])
def test_named(gate, mode, x): gate(m("mine.named", 0.25), mode)
def test_plain(): pass
def test_plain_fails(): assert "<b>" == ""
@pytest.fixture
def broken(): raise ValueError("no kernel <here>")
def test_set_up(gate, mode, broken): pass
def test_parts(gate, mode, subtests):
    gate(m("mine.parts", 0.5), mode)
    with subtests.test("one"): assert 1 == 2, "the first <part>"
    with subtests.test("two"): assert 3 == 4, "the second part"
'''
Page = Callable[..., Path]


@pytest.fixture(scope="module")
def plain_page() -> list[str]:
    return []


@pytest.fixture
def page(project: Path, suites: Run, plain_page: list[str]) -> Page:
    """A page of gates with a baseline, one of them eight times worse by now.

    That of a run without options is made once.
    """
    for file in (project / "suites").glob("test_*.py"):
        file.unlink()
    suite = project / "suites" / "test_own.py"

    def run(*options: str, whole: bool = True) -> Path:
        file = project / "page" / "report.html"
        is_plain = whole and not options
        if is_plain and plain_page:
            file.parent.mkdir()
            file.write_text(plain_page[0], encoding="utf-8")
            return file
        suite.write_text(SUITE.replace("BAD", "0.5"))
        suites("--update-baselines", "--baselines", "own", "--plots", "none")
        suite.write_text(SUITE.replace("BAD", "4.0"))
        form = ["--self-contained-html"] if whole else []
        result = suites(
            "--baselines", "own", f"--html={file}", *form, *options, alone="-n" in options
        )
        assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        if is_plain:
            plain_page.append(file.read_text(encoding="utf-8"))
        return file

    return run


def data(file: Path) -> dict[str, Any]:
    match = re.search(r'data-jsonblob="([^"]*)"', file.read_text(encoding="utf-8"))
    assert match is not None
    tests: dict[str, Any] = json.loads(html.unescape(match[1]))["tests"]
    return tests


def row(file: Path, name: str) -> dict[str, Any]:
    (matching,) = (
        entry for node, rows in data(file).items() for entry in rows if f"::test_{name}[" in node
        or node.endswith(f"::test_{name}")
    )  # fmt: skip
    return dict(matching)


def cells(found: dict[str, Any]) -> dict[str, str]:
    contents = {}
    for cell in found["resultsTableRow"]:
        name = re.search(r'class="col-(\w+)"', cell)
        assert name is not None
        text = re.sub(r"<span hidden>\w*</span>", "", cell)
        contents[name[1]] = re.sub(r"^<td[^>]*>|</td>$", "", text)
    return contents


@proof
@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_gates_have_columns_plots_and_a_head(page: Page, workers: list[str]) -> None:
    file = page(*workers)
    text = file.read_text(encoding="utf-8")
    assert [c for c in re.findall(r'data-column-type="(\w+)"', text) if c in COLUMNS] == COLUMNS
    bad = row(file, "bad")
    contents = cells(bad)
    assert contents["mode"] == "int8"
    assert contents["layer"] == "layers.0"
    assert contents["metric"] == f"kl_divergence {html.escape(EVIL)} (task)"
    assert [contents[name] for name in COLUMNS[3:]] == ["4", "0.51", "7.84x", "8x"]
    (extra,) = bad["extras"]
    assert extra["content"].count("<img") >= 3
    assert "kl_divergence 4 &gt; 0.51" in bad["log"]
    assert row(file, "good")["extras"] == [], "of those that passed only the head shows some"
    assert "Passed, and nearest to their limits" in text
    assert "qgate-head" in text
    assert "tiny-llama" in text
    assert "Modes and layers" not in text, "one cell is no map"


def test_other_tests_stay_as_they_are_and_broken_ones_have_no_verdict(page: Page) -> None:
    file = page()
    for name in ("plain", "plain_fails", "set_up"):
        contents = cells(row(file, name))
        assert [contents[column] for column in COLUMNS] == [""] * 7
    assert cells(row(file, "set_up"))["result"] == "Error"
    assert "1 set-up" in file.read_text() or "no verdict" in file.read_text()
    assert "no kernel &lt;here&gt;" in row(file, "set_up")["log"]


def test_text_of_failed_subtests_is_not_lost(page: Page) -> None:
    log = row(page(), "parts")["log"]
    assert "the first &lt;part&gt;" in log
    assert "the second part" in log


def test_names_are_escaped(page: Page) -> None:
    file = page()
    text = file.read_text(encoding="utf-8")
    assert EVIL not in text
    assert "<img src=x" not in text
    # Names of tests are keys there; only what is in a row gets into the page.
    rows = json.dumps([entry for rows in data(file).values() for entry in rows])
    assert EVIL not in rows
    assert "<img src=x" not in rows
    assert "&lt;img src=x onerror=alert(2)&gt;" in cells(row(file, "named"))["testId"]


@proof
def test_plots_are_drawn_as_asked(page: Page) -> None:
    file = page("--plots", "none")
    assert row(file, "bad")["extras"] == []
    assert "data:image/svg" not in file.read_text()
    file = page("--plots", "failed")
    assert row(file, "bad")["extras"]
    assert "nearest to their limits" not in file.read_text()


@proof
def test_without_self_containment_plots_are_files(page: Page) -> None:
    file = page(whole=False)
    extras = row(file, "bad")["extras"]
    assert len(extras) >= 3
    for extra in extras:
        assert (file.parent / extra["content"]).read_text(encoding="utf-8").startswith("<svg")
        assert extra["name"]


@proof
def test_no_page_of_pytest_html_loads_nothing_of_it(
    project: Path, pytester: pytest.Pytester
) -> None:
    (project / "suites" / "test_own.py").write_text(
        "import sys\ndef test_it(): assert 'qgate.plugin.html_columns' not in sys.modules\n"
    )
    pytester.runpytest_subprocess("suites/test_own.py").assert_outcomes(passed=1)


def test_a_page_without_gates_is_that_of_pytest_html(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    for form in (["--self-contained-html"], []):
        result = run_alone(pytester, "--html=r.html", *form)
        assert result.ret == pytest.ExitCode.OK
        assert "qgate-head" not in (pytester.path / "r.html").read_text()


NUMBERS = [-float("inf"), -2.5, -1e-9, 0.0, 1e-300, 3.5e-5, 0.98, 1.0, 26.6, 1e9, float("inf")]


def test_hidden_keys_sort_as_the_numbers_do() -> None:
    keys = [_key(number) for number in NUMBERS]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(NUMBERS)
    assert _key(None) == _key(float("nan")) == ""


# In a browser -----------------------------------------------------------------------------------


@proof
@pytest.mark.parametrize("whole", [True, False])
def test_in_a_browser_it_sorts_and_shows_its_plots(page: Page, browser: Any, whole: bool) -> None:
    file = page(whole=whole)
    tab = browser.new_page()
    tab.set_default_timeout(PATIENCE_MS)
    messages: list[str] = []
    tab.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(file.as_uri())
    assert tab.locator("#results-table tbody").count() >= 7
    loaded = "images => images.filter(i => i.getAttribute('src')).map(i => i.naturalWidth)"
    widths = tab.eval_on_selector_all("img", loaded)
    assert len(widths) >= (6 if whole else 4)
    assert all(widths)
    for column in COLUMNS:
        tab.click(f"th[data-column-type={column}]")
    values = []
    for _ in range(2):
        tab.click("th[data-column-type=value]")
        texts = tab.locator("td.col-value").all_inner_texts()
        values.append([float(text) for text in texts if text])
    assert sorted(values, key=lambda each: each[0])[0] == [0.25, 0.5, 0.5, 4.0]
    assert values[0] == values[1][::-1]
    assert not messages
    tab.close()
