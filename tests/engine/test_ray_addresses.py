"""Which cluster `ray` means: the one named, the one there is, or a new one here."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qgate.engine import Failure, Workers, map_items
from qgate.engine._ray import RayBackend
from qgate.errors import QgateError
from tests.engine import work
from tests.shares import proof

pytestmark = pytest.mark.usefixtures("no_ray")


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch):
    with pytest.raises(
        QgateError, match=r"no Ray cluster answers at 'ray://127\.0\.0\.1:1': .*refused"
    ):
        list(map_items(work.square, [1], Workers("ray://127.0.0.1:1")))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(QgateError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        list(map_items(work.square, [1], Workers("ray")))


def test_an_item_whose_input_ray_lost_has_failed():
    """As after the end of the cluster, on a machine too busy for its heartbeats."""
    from ray import exceptions as errors

    lost = errors.OwnerDiedError("00ff", None, "")

    def get(_handle):
        raise errors.RayTaskError("work", "its lines", lost).as_instanceof_cause()

    backend = object.__new__(RayBackend)
    backend._ray = SimpleNamespace(exceptions=errors, get=get)
    lost_text = "the cluster ended or lost what it needs, tried 3 times"
    assert backend.wait((1, 2)) == Failure(lost_text)
    with pytest.raises(QgateError, match=f"^a result was lost: {lost_text}\\.$"):
        backend.result((1, 2))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(QgateError, match=r"pip install 'pytest-qgate\[ray\]'"):
        list(map_items(work.square, [1], Workers("ray")))


_ALONE = """
from qgate.engine import Workers, map_items
from tests.engine import work
print(list(map_items(work.square, range(5), Workers("ray", jobs=2))))
import ray
print(ray.is_initialized())
"""


_BUSY = """
from qgate.engine import Workers, map_items
from tests.engine import work
print(list(map_items(work.square_without_node, range(4), Workers("ray", jobs=1))))
"""


@proof
def test_its_own_cluster_lives_without_heartbeats():
    """Ray would take a node of a machine too busy for them for dead: here after half a second."""
    short = {"period_ms": "100", "timeout_ms": "100", "initial_delay_ms": "100"}
    done = subprocess.run(
        [sys.executable, "-c", _BUSY], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, **{f"RAY_health_check_{name}": text for name, text in short.items()}},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[0, 1, 4, 9]"], done.stdout + done.stderr


@proof
def test_without_a_cluster_one_is_made_and_taken_down_again():
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["[0, 1, 4, 9, 16]", "False"], done.stderr
