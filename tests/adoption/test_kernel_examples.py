"""Every example of docs/examples/kernels runs, and the page of kernels links to it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples" / "kernels").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path))


def test_the_page_links_to_every_example() -> None:
    page = (DOCS / "kernels.md").read_text(encoding="utf-8")
    assert re.findall(r"examples/kernels/(\w+)\.py", page)
    assert {*re.findall(r"examples/kernels/(\w+)\.py", page)} == {path.stem for path in EXAMPLES}
