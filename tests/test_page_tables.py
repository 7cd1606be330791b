"""Tables of pages say what registries and settings say."""

from __future__ import annotations

import pytest

from qgate.results.kinds import SCOPES, Scope
from tests.page_tables import DOCS, END, MARK, TABLES, limits_table, replaced


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_up_to_date(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert replaced(page, TABLES[name]()) == page, "run python -m tests.page_tables --write"


def test_another_default_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Scope(name="router", limits={"regression": 0.3})
    monkeypatch.setitem(SCOPES.entries, "router", router)
    assert "| 0.02 | router 0.3 |" in limits_table()


def test_a_page_without_a_place_is_an_error() -> None:
    assert replaced(f"a\n{MARK}old\n{END}\nb", "new") == f"a\n{MARK}\nnew\n\n{END}\nb"
    for page in ("a", MARK, END):
        with pytest.raises(ValueError, match="no place for a table"):
            replaced(page, "new")
