"""The example of docs/audit.md is what a run prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import readme
from tests.plugin.conftest import run_alone

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def test_the_example_prints_what_the_page_shows(pytester: pytest.Pytester) -> None:
    blocks = readme.blocks(PAGE.read_text(encoding="utf-8"))
    example = next(block for block in blocks if block.language == "python")
    printed = next(block for block in blocks if block.line > example.line)
    (pytester.path / "test_example.py").write_text(example.text, encoding="utf-8")
    result = run_alone(
        pytester, "-p", "qgate.audit", "-p", "no:cacheprovider", "-p", "no:qgate.plugin"
    )
    assert result.ret == 0
    for line in printed.text.splitlines():
        assert line in result.outlines
