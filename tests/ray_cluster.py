"""A Ray cluster of two nodes for tests, with few processes beside its workers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ROOT = Path(__file__).parents[1]
MEMORY = {"object_store_memory": 100_000_000}
# A node that is gone refuses connections at once; Ray by itself asks five times in 15 seconds.
CONFIG = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 100}


@contextmanager
def running() -> Iterator[Cluster]:
    """Start the cluster and connect this process to it."""
    head = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True,
            "include_log_monitor": False, "_system_config": CONFIG, **MEMORY}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Workers look for the functions of tests, wherever the first test stands that starts them.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1, **MEMORY)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def joined_node(cluster: Cluster, module: str) -> Any:
    """Add a node of two processors whose workers have loaded a module, so that they get work."""
    node = cluster.add_node(num_cpus=2, **MEMORY)
    strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    load = ray.remote(_load).options(scheduling_strategy=strategy)
    ray.get([load.remote(module) for _ in range(2)])
    return node


def _load(module: str) -> None:
    importlib.import_module(module)
