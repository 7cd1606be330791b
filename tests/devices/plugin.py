"""Plugs the simulated device in where it is imported: `python -m pytest -p tests.devices.plugin`."""

from tests.devices import simulated

simulated.plugged().__enter__()  # until the process ends
