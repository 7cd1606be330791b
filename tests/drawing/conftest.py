"""Records of dumps for the tests of drawings; nobody changes them."""

from __future__ import annotations

import pytest

from qgate.summaries.record import DumpAnalysis
from tests.drawing import dump_records


@pytest.fixture(scope="session")
def normal() -> DumpAnalysis:
    return dump_records.quiet(dump_records.normal_record)


@pytest.fixture(scope="session")
def hostile() -> DumpAnalysis:
    return dump_records.quiet(dump_records.hostile_names)


@pytest.fixture(scope="session", params=dump_records.EXTREMES)
def extreme(request: pytest.FixtureRequest) -> DumpAnalysis:
    return dump_records.quiet(dump_records.EXTREMES[request.param])
