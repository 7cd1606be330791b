"""Ray's memory monitor, made to believe that the machine is nearly full."""

from pathlib import Path

import pytest
import ray

from qgate.engine import Failure, Workers, _ray, map_items
from tests.engine import work
from tests.shares import proof


@pytest.fixture
def small_machine(no_ray):  # noqa: ARG001  before this cluster starts, which it would wait for
    """A cluster that kills workers once a gigabyte more than now is in use."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    memory = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    full = 1 - (memory["MemAvailable"] - 2**20) / memory["MemTotal"]
    config = {"memory_usage_threshold": full, "memory_monitor_refresh_ms": 100}
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config=config,
    )
    yield
    ray.shutdown()


@proof
@pytest.mark.usefixtures("small_machine")
def test_an_item_too_large_for_the_machine_fails_alone(monkeypatch):
    """Ray alone would start it again without end."""
    monkeypatch.setattr(_ray, "OUT_OF_MEMORY_TRIES", 2)
    results = list(map_items(work.greedy, range(6), Workers("ray")))
    assert results[3] == Failure("its worker ran out of memory, tried 2 times")
    assert [x for x in results if not isinstance(x, Failure)] == [0, 1, 2, 4, 5]
