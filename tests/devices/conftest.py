"""The simulated device is there for the tests of this folder, and for no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices import simulated


@pytest.fixture(autouse=True)
def plugged_in() -> Iterator[None]:
    with simulated.plugged():
        yield
