"""A pytest plugin of the repetitions: tests in an order drawn from QGATE_TEST_ORDER."""

from __future__ import annotations

import os
import random

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of one session draw the same order, as xdist demands."""
    random.Random(os.environ["QGATE_TEST_ORDER"]).shuffle(items)
