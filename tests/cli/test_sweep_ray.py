"""A sweep of many files on a real Ray cluster: a node and a driver are lost in the middle of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
import torch

from qgate.cli import main
from tests.ray_cluster import joined_node
from tests.shares import proof, slow_file

pytestmark = slow_file

FILES = 60
SWEEP = ["sweep", "*.pt", "--no-plots", "-v", "--num-levels", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files, and what this process alone makes of them."""
    folder_path = tmp_path_factory.mktemp("sweep")
    generator = torch.Generator().manual_seed(0)
    for i in range(FILES):
        torch.save(torch.randn(8, 64, generator=generator), folder_path / f"t{i:03d}.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder_path)
        assert main([*SWEEP, "--output-dir", "local"]) == 0
    return folder_path


@pytest.fixture
def _in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def swept(output):
    return len(list(Path(output).glob("t*")))


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


@proof
@pytest.mark.usefixtures("_in_the_folder")
def test_a_node_killed_in_the_middle_changes_nothing(ray_cluster, capsys):
    node = joined_node(ray_cluster, "qgate.sweeps.running")
    done = []

    def kill():
        while swept("nodes") < 15:
            time.sleep(0.01)
        done.append(swept("nodes"))
        ray_cluster.remove_node(node, allow_graceful=False)

    killing = threading.Thread(target=kill)
    killing.start()
    assert main([*SWEEP, "--output-dir", "nodes", "--set", "engine=ray"]) == 0
    killing.join()
    assert done[0] < FILES
    assert f"Successful: {FILES}" in capsys.readouterr().out
    assert contents("nodes") == contents("local")


@proof
@pytest.mark.usefixtures("_in_the_folder")
def test_a_driver_killed_in_the_middle_goes_on_with_the_rest(ray_cluster, capsys):
    words = [*SWEEP, "--output-dir", "driver", "--set", "engine=ray"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "qgate", *words],
        env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while swept("driver") < 10:
        assert driver.poll() is None, driver.stdout.read()
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    done = swept("driver")
    assert done < FILES
    capsys.readouterr()
    assert main(words) == 0
    before = capsys.readouterr().out.count("Swept before, and not again")
    assert done - 2 <= before <= done, "all but the file that was being written"
    assert contents("driver") == contents("local")
    assert not list(Path("driver").glob(".*"))


@proof
@pytest.mark.usefixtures("ray_cluster", "_in_the_folder")
def test_pictures_are_drawn_by_workers():
    names = ["t000.pt", "t001.pt"]
    words = ["--granularity", "block", "--set", "engine=ray", "--jobs", "2"]
    assert main(["sweep", *names, *words, "--output-dir", "pictures"]) == 0
    assert len([path for path in Path("pictures").rglob("*.png") if path.stat().st_size]) == 2
    for path in Path("pictures").rglob("*.json"):
        assert path.read_bytes() == Path("local", *path.parts[1:]).read_bytes()


@pytest.mark.usefixtures("ray_cluster")
def test_no_worker_is_left_behind():
    end = time.monotonic() + 120
    while ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU"):
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.1)
