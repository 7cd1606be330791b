"""Every example of docs/examples runs, and a page links to it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.shares import always, share, slow_file

pytestmark = slow_file

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").rglob("*.py"))


@share(6)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path))


@always
def test_pages_link_to_every_example() -> None:
    texts = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")]
    links = {
        link for text in texts for link in re.findall(r"\((?:\.\./)?(examples/\S+\.py)\)", text)
    }
    assert links == {path.relative_to(DOCS).as_posix() for path in EXAMPLES}
