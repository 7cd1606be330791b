"""A plugin of its own, `-p qgate.plugin.gate_listing`: what a run would hold, in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qgate.plugin.settings import options_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--qgate-list", metavar="FILE", help="write the gates and their files here")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the ids of all gates, the paths that decide about them, and where results go."""
    config = session.config
    options, here = options_of(config), config.invocation_params.dir
    paths = [argument.partition("::")[0] for argument in config.args]
    paths += [str(path) for path in (options.baselines, config.inipath) if path is not None]
    listing = {
        "gates": [item.nodeid for item in session.items if item.get_closest_marker("qgate")],
        "paths": [path if "://" in path else os.path.normpath(here / path) for path in paths],
        "home": str(options.home),
    }
    path = Path(config.getoption("--qgate-list"))
    path.write_text(json.dumps(listing), encoding="utf-8", newline="\n")
