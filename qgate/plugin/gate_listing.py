"""A plugin of its own, `-p qgate.plugin.gate_listing`: the ids of collected gates in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--qgate-list", metavar="FILE", help="write the ids of all gates here")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    nodes = [item.nodeid for item in session.items if item.get_closest_marker("qgate")]
    path = Path(session.config.getoption("--qgate-list"))
    path.write_text(json.dumps(nodes), encoding="utf-8", newline="\n")
