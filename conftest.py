"""Makes `pytest suites` work in a checkout that is not installed."""

import sys

import pytest

pytest_plugins = ["qgate.plugin"]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Spare runs without hypothesis its import, which its summary costs them."""
    manager = session.config.pluginmanager
    if "hypothesis" not in sys.modules and manager.hasplugin("hypothesispytest"):
        manager.unregister(name="hypothesispytest")
