"""Plugs the simulated device in where it is imported: `python -m pytest -p tests.devices.plugin`."""

from tests.devices import simulated

IN_USE = simulated.plugged()  # kept: what is thrown away is unplugged
IN_USE.__enter__()
