"""Registers the simulated device where it is imported: `python -m pytest -p tests.devices.plugin`."""

from tests.devices import simulated

simulated.register()
