"""Makes `pytest suites` work in a checkout that is not installed."""

pytest_plugins = ["qgate.plugin"]
