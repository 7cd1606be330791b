"""A sweep of 200 files on a real Ray cluster: nodes and the driver are lost in the middle of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.usefixtures("one_ray")

FILES = 200
SWEEP = [
    sys.executable,
    "-m",
    "qgate",
    "sweep",
    "*.pt",
    "--no-plots",
    "--quiet",
    "--num-levels",
    "5",
]


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """200 files, and what this process alone makes of them."""
    made = tmp_path_factory.mktemp("sweep")
    for i in range(FILES):
        torch.save(
            torch.randn(8, 64, generator=torch.Generator().manual_seed(i)), made / f"t{i:03d}.pt"
        )
    subprocess.run([*SWEEP, "--output-dir", "local"], cwd=made, check=True, capture_output=True)
    return made


def started(folder, cluster, output):
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*SWEEP, "--output-dir", output, "--engine", "ray"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def reached(folder, output, count, running):
    """Until so many files are done; the run must not have ended before."""
    end = time.monotonic() + 120
    while len(list((folder / output).glob("t*"))) < count:
        assert running.poll() is None, running.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def contents(folder: Path):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


def test_a_node_killed_in_the_middle_changes_nothing(folder, cluster):
    node = cluster.add_node(num_cpus=2)
    running = started(folder, cluster, "nodes")
    reached(folder, "nodes", 40, running)
    cluster.remove_node(node, allow_graceful=False)
    out, _ = running.communicate(timeout=300)
    assert running.returncode == 0, out
    assert f"Successful: {FILES}" in out
    assert contents(folder / "nodes") == contents(folder / "local")


def test_a_driver_killed_in_the_middle_goes_on_with_the_rest(folder, cluster):
    running = started(folder, cluster, "driver")
    reached(folder, "driver", 30, running)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=120)
    done = len(list((folder / "driver").glob("t*")))
    assert done < FILES
    again = started(folder, cluster, "driver")
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0, out
    before = out.count("Swept before, and not again")
    assert done - 2 <= before <= done, "all but the file that was being written"
    assert contents(folder / "driver") == contents(folder / "local")
    assert not list((folder / "driver").glob(".*"))


def test_no_worker_is_left_behind(cluster):
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        end = time.monotonic() + 120
        while ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU"):
            assert time.monotonic() < end, ray.available_resources()
            time.sleep(0.2)
    finally:
        ray.shutdown()
